"""Parameter server: the first replica has the weights, the others push and pull without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dni_runtime.core.optimization import Optimization
from dni_runtime.core.replication.base import Strategy, Sync
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import Frozen


class ParameterServer(Strategy):
    """Each pushes how far it has come, the first one adds that to its weights and sends them back.

    Downpour SGD (Dean et al. 2012, NIPS 25, sec. 4.1). What is pushed is the sum of a replica's own
    steps, instead of gradients for an optimizer of the server; the server is a replica, too, and
    counts as the others do. A replica that has gone on meanwhile keeps what it has learnt since its
    push. Statistics move towards the pushed ones, by one part in N. Only at a full point all wait.

    With a ``scale`` of 1/N, the default, the server moves by the mean of what all have learnt, as
    in asynchronous local SGD (Liu et al. 2024, arXiv:2401.09135, sec. 3). With 1 it moves by their
    sum, as Downpour does: that goes too far unless learning rates are lower.
    """

    class Options(Frozen):
        """What a replica's progress is multiplied by; by default one divided by their number."""

        scale: float | None = Field(default=None, gt=0, le=1)

    waits: ClassVar[bool] = False

    pushed_P: Tensor
    applied_N: Tensor

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        assert isinstance(options, ParameterServer.Options)
        self._scale = options.scale
        self.register_buffer("pushed_P", start_P.clone())

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        """Make room for the other replicas.

        ``applied_N`` has the point of the newest push of each that is in the weights: a restarted
        server may get one twice.
        """
        self.register_buffer("applied_N", torch.zeros(spec.replicas - 1, dtype=torch.int64))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of as many replicas as there are now: the number may have changed."""
        applied_N = torch.zeros_like(self.applied_N)
        kept = state_dict["applied_N"][: len(applied_N)]
        applied_N[: len(kept)] = kept
        return super().load_state_dict({**state_dict, "applied_N": applied_N}, strict, assign)

    def joined(self, own_P: Tensor) -> None:
        self.pushed_P = own_P.clone()

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor:
        """Hand over the progress since the last push."""
        progress_P = own_P - self.pushed_P
        self.pushed_P = own_P.clone()
        return progress_P

    def with_own(self, own: Tensor, learnt: int, replicas: int) -> Tensor:
        """Return the server's row with its own progress counted as that of the others.

        The row begins with ``learnt`` trained parameters; the module has ``replicas``.
        """
        self.pushed_P = torch.lerp(self.pushed_P, own[:learnt], self._factor(replicas))
        return torch.cat([self.pushed_P, own[learnt:]])

    def with_push(self, own: Tensor, push: Tensor, learnt: int, replicas: int) -> Tensor:
        """Return the server's row after a push; both begin with ``learnt`` trained parameters."""
        moved_P, kept = push[:learnt] * self._factor(replicas), own[learnt:]
        self.pushed_P = self.pushed_P + moved_P
        return torch.cat([own[:learnt] + moved_P, kept + (push[learnt:] - kept) / replicas])

    def _factor(self, replicas: int) -> float:
        return self._scale or 1 / replicas

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        """Return the server's parameters with the progress since the push."""
        since_P = own_P - self.pushed_P
        self.pushed_P = agreed_P.clone()
        return agreed_P + since_P
