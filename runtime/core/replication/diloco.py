"""DiLoCo: an outer optimizer on the mean's distance."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from dni_runtime.core.replication.base import Strategy
from dni_runtime.spec.named import Frozen


class DiLoCo(Strategy):
    """The mean's distance is the gradient of an outer optimizer, SGD with Nesterov momentum.

    Douillard et al. 2023, arXiv:2311.08105, algorithm 1; the defaults are the paper's. The first
    replica has the outer optimizer.
    """

    class Options(Frozen):
        """The outer optimizer's learning rate and momentum."""

        lr: float = Field(default=0.7, gt=0)
        momentum: float = Field(default=0.9, ge=0, lt=1)

    before_P: Tensor
    velocity_P: Tensor

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        assert isinstance(options, DiLoCo.Options)
        self._options = options
        self.register_buffer("before_P", start_P.clone())
        self.register_buffer("velocity_P", torch.zeros_like(start_P))

    def agree(self, mean_P: Tensor) -> Tensor:
        outer_P, momentum = self.before_P - mean_P, self._options.momentum
        self.velocity_P.mul_(momentum).add_(outer_P)
        self.before_P.sub_(outer_P + momentum * self.velocity_P, alpha=self._options.lr)
        return self.before_P.clone()
