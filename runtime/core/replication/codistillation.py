"""Codistillation: each replica is drawn towards what the other one would compute."""

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
    """Two replicas keep their own weights, and stale copies of each other's.

    Two-way codistillation (Anil et al. 2018, arXiv:1804.03235, algorithm 1). A module between head
    and tail predicts its activation h, so the term that is added to its loss for a sample is::

        weight mean((h - h')^2)

    where h' is the other one's activation for the same input, by its weights at the last point: the
    mean of both, from which each finds the other's. Statistics are each replica's own, too.
    """

    common: ClassVar[bool] = False
    needs: ClassVar[int | None] = 2

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

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self.other_P.copy_(2 * agreed_P - own_P)
        self.points += 1
        return own_P
