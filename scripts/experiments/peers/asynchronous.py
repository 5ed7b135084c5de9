"""Asynchronous pipelines without a flush: PipeDream's 1F1B with weight stashing, and PipeDream-2BW.

Forward and backward of micro-batches take turns at each stage (1F1B), across the borders of
batches: the pipeline is filled once. What keeps a micro-batch's backward true to its forward are
copies of the stage's weights, each of which stays as it is while a micro-batch uses it:

* async-1f1b (Narayanan et al. 2019, arXiv:1806.03377, sec. 3.3): an update after each batch; a
  batch has the newest weights of its forward, and there are as many copies as batches under way;
* 2bw (Narayanan et al. 2021, arXiv:2006.09503, sec. 3.1): gradients of M micro-batches are added;
  W(t + 1) = W(t) - f(gradient of batch t at W(t - 1)), with two copies, at all stages alike.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers.build import ACTIVATIONS, GRADIENTS, cross_entropy
from peers.pipelines import predict_in_stages


class AsynchronousPipeline:
    """One stage, in a process of its own."""

    period = 1

    def __init__(
        self,
        module: nn.Module,  # the stage, with its newest weights
        optimizer: Callable[[nn.Module], Any],
        stage: int,  # its number, which is the process's rank
        shapes: list[tuple[int, ...]],  # of one sample behind each stage
        batch: int,  # samples
        *,
        micro_batches: int,  # parts of a batch, whose gradients are added up to one update
        versions: int,  # copies of the weights; batch t uses number t modulo versions
        in_flight: int,  # micro-batches whose forward is done before the first one's backward
    ) -> None:
        if in_flight > (versions - 1) * micro_batches + 1:
            raise ValueError(
                f"{in_flight} micro-batches under way need more than {versions} copies"
            )
        if batch % micro_batches:
            raise ValueError(f"a batch of {batch} has no {micro_batches} equal parts")
        self.module = module
        self._optimizer = optimizer(module)
        self._copies = [module] if versions == 1 else [_copied(module) for _ in range(versions)]
        self._stage, self._shapes, self._stages = stage, shapes, len(shapes)
        self._first, self._last = stage == 0, stage == len(shapes) - 1
        self.reads = self._first or self._last
        self._micro_batches, self._in_flight = micro_batches, in_flight
        self._begun = self._done = 0
        self._under_way: deque[tuple[Tensor, Tensor]] = deque()
        size = batch // micro_batches
        if not self._first:
            above = (size, *shapes[stage - 1])
            self._activations = Receiver(stage - 1, ACTIVATIONS, above, in_flight)
            self._gradients_up = Sender(stage - 1, GRADIENTS)
        if not self._last:
            below = (size, *shapes[stage])
            self._gradients = Receiver(stage + 1, GRADIENTS, below, in_flight)
            self._activations_down = Sender(stage + 1, ACTIVATIONS)

    def step(self, x_BX: Tensor | None, y_BY: Tensor | None) -> None:
        """Forward of one batch's micro-batches, and as many backwards once the pipeline is full."""
        count = self._micro_batches
        inputs = x_BX.chunk(count) if self._first and x_BX is not None else [None] * count
        labels = y_BY.chunk(count) if self._last and y_BY is not None else [None] * count
        for x_MX, y_MY in zip(inputs, labels, strict=True):
            self._forward(x_MX, y_MY)
            if len(self._under_way) == self._in_flight:
                self._backward()

    def finish(self) -> None:
        """The backwards that are left over: the pipeline is empty then."""
        while self._under_way:
            self._backward()

    def predict(self, x_BX: Tensor) -> Tensor | None:
        """With the newest weights; what is under way stays so."""
        stages = list(range(self._stages))
        return predict_in_stages(
            {self._stage: self.module}, stages, self._stage, self._shapes, x_BX
        )

    def _forward(self, x_MX: Tensor | None, y_MY: Tensor | None) -> None:
        if x_MX is None:
            x_MX = self._activations.take().requires_grad_()
        h_MH = self._copy_of(self._begun)(x_MX)
        self._begun += 1
        if self._last:
            assert y_MY is not None
            h_MH = cross_entropy(h_MH, y_MY) / self._micro_batches
        else:
            self._activations_down.send(h_MH.detach())
        self._under_way.append((x_MX, h_MH))

    def _backward(self) -> None:
        x_MX, h_MH = self._under_way.popleft()
        h_MH.backward(None if self._last else self._gradients.take())
        if not self._first:
            assert x_MX.grad is not None
            self._gradients_up.send(x_MX.grad)
        used = self._copy_of(self._done)
        self._done += 1
        if self._done % self._micro_batches == 0:
            self._update(used)

    def _copy_of(self, number: int) -> nn.Module:
        """The copy that a micro-batch uses."""
        return self._copies[number // self._micro_batches % len(self._copies)]

    def _update(self, used: nn.Module) -> None:
        """Step from the newest weights along the gradient at ``used``, which then gets them."""
        if used is not self.module:
            for newest, old in zip(self.module.parameters(), used.parameters(), strict=True):
                newest.grad, old.grad = old.grad, None
        self._optimizer.step()
        self._optimizer.zero_grad()
        if used is not self.module:
            with torch.no_grad():
                torch._foreach_copy_(list(used.parameters()), list(self.module.parameters()))


def _copied(module: nn.Module) -> nn.Module:
    """Weights of its own, and the same buffers (BatchNorm's running figures)."""
    made = copy.deepcopy(module)
    for own, original in zip(made.modules(), module.modules(), strict=True):
        own._buffers = original._buffers
    return made


class Receiver:
    """Takes tensors from another process in the order in which they were sent.

    It is always ready for the next ``ahead``, so that none waits for a round trip before it is
    sent.
    """

    def __init__(self, rank: int, tag: int, shape: tuple[int, ...], ahead: int) -> None:
        self._rank, self._tag, self._shape = rank, tag, shape
        self._coming: deque[tuple[Tensor, Any]] = deque()
        for _ in range(ahead):
            self._expect()

    def take(self) -> Tensor:
        """The next one, when it is there."""
        self._expect()
        tensor, work = self._coming.popleft()
        work.wait()
        return tensor

    def _expect(self) -> None:
        tensor = torch.empty(self._shape)
        self._coming.append((tensor, dist.irecv(tensor, self._rank, tag=self._tag)))


class Sender:
    """Sends tensors to another process; waits only if more than ``most`` are under way."""

    def __init__(self, rank: int, tag: int, most: int = 64) -> None:
        self._rank, self._tag, self._most = rank, tag, most
        self._going: deque[tuple[Tensor, Any]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send one; nobody may change it any more."""
        tensor = tensor.contiguous()
        self._going.append((tensor, dist.isend(tensor, self._rank, tag=self._tag)))
        while len(self._going) > self._most:
            self._going.popleft()[1].wait()
