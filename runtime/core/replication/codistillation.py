"""Codistillation: each replica is drawn towards what another one would compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dni_runtime.core.optimization import Optimization
from dni_runtime.core.replication.base import Strategy
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import Frozen


class Codistillation(Strategy):
    """Replicas keep their own weights, and each a stale copy of another one's.

    Anil et al. 2018, arXiv:1804.03235, algorithm 1. A module predicts its activation h, so the term
    that is added to its loss for a sample is::

        weight mean((h - h')^2)

    where h' is the other one's activation for the same input, by its weights at the last point. The
    paper's term has the mean of all others; here it is one of them, another one after each point,
    so that a batch costs one more forward pass whatever their number. Statistics are each replica's
    own, too.
    """

    common: ClassVar[bool] = False

    class Options(Frozen):
        """The weight of the term, and the points before it is added."""

        weight: float = Field(default=1.0, gt=0)
        burn_in: int = Field(default=1, ge=1)

    other_P: Tensor
    points: Tensor

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        assert isinstance(options, Codistillation.Options)
        self._options = options
        self.register_buffer("other_P", start_P.clone())
        self.register_buffer("points", torch.zeros((), dtype=torch.int64))

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        for p in optimization.parameters[:1]:
            self.other_P = self.other_P.to(p.device)

    def weight(self, samples: int) -> float:
        return 1.0

    def pull(self, h_BH: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor | None:
        if self.points < self._options.burn_in:
            return None
        return (h_BH - activation(self.other_P)) * (2 * self._options.weight / h_BH[0].numel())

    def other(self, replicas: int) -> int:
        return 1 + int(self.points) % (replicas - 1)

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self.other_P.copy_(agreed_P)
        self.points += 1
        return own_P
