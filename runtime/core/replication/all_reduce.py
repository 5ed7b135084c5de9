"""All-reduce: one step with the mean of all gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from dni_runtime.core.optimization import Optimization
from dni_runtime.core.replication.base import Strategy, Sync
from dni_runtime.core.training import real, split_like
from dni_runtime.spec import WorkerSpec


class AllReduce(Strategy):
    """One step with the mean of all gradients: that of one process with a large batch.

    Synchronous data parallelism, as in Goyal et al. 2017, arXiv:1706.02677, sec. 2. Each batch
    since the last point counts once, as with ``accumulate``. The first replica's optimizer makes
    the step, and all take its weights: one that has missed some is right again. The gradient
    interface, which learns from each batch by itself, and statistics are averaged.
    """

    per_step = True
    dense = True

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        self._optimization = optimization
        self.gradients = sum(real(p.detach()).numel() for p in optimization.parameters)
        self._batches, self._without = 0, [True] * len(optimization.parameters)
        self._decides = spec.backend is None  # in a process group each makes the step
        optimization.holds = True

    def weight(self, samples: int) -> float:
        return float(self._optimization.gathered)

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor | None:
        batches = self._optimization.gathered
        if not batches:
            return None
        self._batches = batches
        self._without = [p.grad is None for p in self._optimization.parameters]
        gradients = [
            real(torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(own_P)
            for p in self._optimization.parameters
        ]
        self._optimization.clear()
        return torch.cat([*(one / batches for one in gradients), own_P[self.gradients :]])

    def agree(self, mean_P: Tensor) -> Tensor:
        parameters = self._optimization.parameters
        gradients = split_like(mean_P, parameters)
        for p, g, without in zip(parameters, gradients, self._without, strict=True):
            left = without and self._decides and not g.any()
            p.grad = None if left else g.clone()  # as in one process
        self._optimization.step()
        own = [real(p.detach()).flatten().to(mean_P) for p in parameters]
        return torch.cat([*own, mean_P[self.gradients :]])

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self._optimization.count(self._batches)
        self._batches = 0
        return agreed_P

    def base(self, agreed_P: Tensor) -> Tensor:
        return torch.cat([agreed_P.new_zeros(self.gradients), agreed_P[self.gradients :]])
