"""ADMM: each replica's own problem, with a pull to the consensus."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from dni_runtime.core.optimization import Optimization
from dni_runtime.core.replication.base import Strategy, Sync
from dni_runtime.core.training import real, split_like
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import Frozen


class Admm(Strategy):
    """Consensus by the alternating direction method of multipliers.

    Boyd et al. 2011, doi:10.1561/2200000016, sec. 7.1, in the scaled form of sec. 3.1.1::

        x_i = argmin f_i(x) + rho/2 |x - z + u_i|^2,   z = mean(x_i + u_i),   u_i = u_i + x_i - z

    The minimization is inexact: the steps of the module's optimizer between two points, with the
    gradient of the second term added, begin at z. The gradient interface's parameters are averaged
    in the same way, without that term. Every replica counts the same.
    """

    dense = True
    feedback = False  # the dual variables add up what is missing in z

    class Options(Frozen):
        """The penalty parameter."""

        rho: float = Field(default=0.01, gt=0)

    consensus_P: Tensor
    dual_P: Tensor

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        assert isinstance(options, Admm.Options)
        self._rho = options.rho
        self.register_buffer("consensus_P", start_P.clone())
        self.register_buffer("dual_P", torch.zeros_like(start_P))

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        self._own = sum(real(p.detach()).numel() for p in optimization.parameters)
        optimization.before_step = self._pull

    def weight(self, samples: int) -> float:
        return 1.0

    def _pull(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of the second term, rho (x - z + u)."""
        toward_P = self.consensus_P - self.dual_P
        for p, toward in zip(parameters, split_like(toward_P, parameters), strict=True):
            pull = (p.detach() - toward).mul_(self._rho)
            p.grad = pull if p.grad is None else p.grad + pull

    def joined(self, own_P: Tensor) -> None:
        self.dual_P.zero_()

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor:
        return own_P + self.dual_P

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self.consensus_P.copy_(agreed_P)
        self.dual_P[: self._own] += (own_P - agreed_P)[: self._own]
        return agreed_P
