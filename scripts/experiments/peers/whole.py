"""Peers whose every process has the whole network: backprop, DDP, local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers.build import cross_entropy, in_eval_mode

OUTER_LEARNING_RATE = 0.7
OUTER_MOMENTUM = 0.9
"""DiLoCo's best (Douillard et al. 2023, arXiv:2311.08105, sec. 3.1 and appendix)."""


class Whole:
    """Backprop on this process's equal share of each batch.

    With several processes the model is a DistributedDataParallel, which averages the gradients.
    """

    reads = True
    period = 1

    def __init__(self, model: nn.Module, optimizer: Any, rank: int = 0, world: int = 1) -> None:
        self.model = model
        self._optimizer = optimizer
        self._rank = rank
        self._world = world

    def step(self, x_BX: Tensor | None, y_BY: Tensor | None) -> None:
        assert x_BX is not None
        assert y_BY is not None
        size = len(x_BX) // self._world
        mine = slice(self._rank * size, (self._rank + 1) * size)
        self._optimizer.zero_grad()
        cross_entropy(self.model(x_BX[mine]), y_BY[mine]).backward()
        self._optimizer.step()

    def predict(self, x_BX: Tensor) -> Tensor | None:
        if self._rank:
            return None
        return in_eval_mode(getattr(self.model, "module", self.model), x_BX)


class LocalSgd(Whole):
    """Replicas that begin equal, train alone and are averaged after ``every`` batches (Stich 2018).

    The optimizers' moments stay with the replicas, arXiv:1805.09767 has none. BatchNorm's running
    figures are averaged, too.
    """

    def __init__(self, model: nn.Module, optimizer: Any, every: int, rank: int, world: int) -> None:
        super().__init__(model, optimizer, rank, world)
        self.period = every
        self._steps = 0
        self._parameters = [p.detach() for p in model.parameters()]
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]

    def step(self, x_BX: Tensor | None, y_BY: Tensor | None) -> None:
        super().step(x_BX, y_BY)
        self._steps += 1
        if self._steps % self.period == 0:
            self._synchronize()

    def _synchronize(self) -> None:
        _copy(self._mean(self._parameters + self._buffers), self._parameters + self._buffers)

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Means over all processes, in one message."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        flat /= self._world
        parts = flat.split([t.numel() for t in tensors])
        return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


class Diloco(LocalSgd):
    """Replicas whose common change is one step of an outer optimizer (arXiv:2311.08105, alg. 1).

    The inner optimizer, AdamW in the paper, is the replica's; the outer one is SGD with Nesterov
    momentum along the mean of what the replicas have moved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        every: int,
        rank: int,
        world: int,
        outer: Callable[[list[Tensor]], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, every, rank, world)
        self._outer = [p.clone() for p in self._parameters]
        self._outer_optimizer = (outer or nesterov)(self._outer)

    def _synchronize(self) -> None:
        means = self._mean(self._parameters + self._buffers)
        _copy(means[len(self._outer) :], self._buffers)
        for outer, mean in zip(self._outer, means, strict=False):
            outer.grad = outer - mean
        self._outer_optimizer.step()
        _copy(self._outer, self._parameters)


def nesterov(parameters: list[Tensor]) -> Any:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(
        parameters, lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True
    )


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
