"""A whole chain in one process, without sockets: the reference for the distributed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from dni_runtime.core.layers import build_module
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.optimization import Optimization
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.training import module_seed, seeded
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Part

Carry: TypeAlias = Callable[[int, Tensor], Tensor]
"""Returns a tensor as it arrives across the cut below the module with this index."""


def _unchanged(cut: int, tensor: Tensor) -> Tensor:
    return tensor


class LocalChain:
    """Modules that hand their tensors to each other directly.

    Args:
        workers: The modules' specs, head first.
        delay: Training batches by which a gradient is late on each link, or on every link. Delays
            add up link by link, as they do between workers.
        down: Changes activations at a cut, such as narrowing them.
        up: Changes gradients at a cut.
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        *,
        delay: int | Sequence[int] = 0,
        down: Carry = _unchanged,
        up: Carry = _unchanged,
    ) -> None:
        cuts = len(workers) - 1
        self._delays = [delay] * cuts if isinstance(delay, int) else list(delay)
        if len(self._delays) != cuts:
            raise ValueError(f"{len(self._delays)} delays for {cuts} links")
        self._micro_batches = 1 if workers[0].head is None else workers[0].head.micro_batches
        self.steps = []
        for index, worker in enumerate(workers):  # stores must not limit delays
            late = max(worker.late, sum(self._delays[index:]) * self._micro_batches)
            self.steps.append(ModuleStep(worker.model_copy(update={"late": late})))
        self._late: list[deque[tuple[int, int, Tensor]]] = [deque() for _ in workers]
        self._down = down
        self._up = up
        self._now = self._id = 0

    def train_batch(self, x_BX: Tensor, y_BY: Tensor) -> float:
        """Train every module on one batch.

        Returns:
            The tail's loss.
        """
        self._now += 1
        loss = 0.0
        for part, x, y in parts_of(x_BX, y_BY, self._micro_batches):
            self._id += 1
            for index, step in enumerate(self.steps):
                if index:
                    x = self._down(index - 1, x)
                before = torch.get_rng_state()
                torch.set_rng_state(step.random_state)  # as in a process of its own
                x = step.forward(self._id, x, part)
                g = step.update(y)  # a local head may draw, too
                step.random_state = torch.get_rng_state()
                torch.set_rng_state(before)
                self._pass_up(index, self._id, g)
            self._deliver()
            own = self.steps[-1].counters.loss
            assert own is not None
            loss += float(own) * len(y) / len(y_BY)
        while any(step.blocked for step in self.steps):  # modules wait for gradients
            self._now += 1
            self._deliver()
        return loss

    def end_epoch(self) -> None:
        """Step the schedules that count epochs."""
        for step in self.steps:
            step.optimization.end_epoch()

    def predict(self, x_BX: Tensor) -> Tensor:
        """Return the chain's output in eval mode."""
        for index, step in enumerate(self.steps):
            if index:
                x_BX = self._down(index - 1, x_BX)
            x_BX = step.evaluate(x_BX)
        return x_BX

    def _pass_up(self, index: int, id: int, g_BX: Tensor | None) -> None:
        if g_BX is not None and index > 0:
            due = self._now + self._delays[index - 1]
            self._late[index - 1].append((due, id, self._up(index - 1, g_BX)))

    def _deliver(self) -> None:
        """Hand over the gradients that have arrived."""
        for index in range(len(self.steps) - 1, -1, -1):
            late = self._late[index]
            while late and late[0][0] <= self._now:
                _, id, g_BH = late.popleft()
                self._pass_up(index, id, self.steps[index].late_gradient(id, g_BH))


def parts_of(x_BX: Tensor, y_BY: Tensor, count: int) -> Iterator[tuple[Part, Tensor, Tensor]]:
    """Cut a training batch into ``count`` parts, or as many as it has pairs of samples.

    A last part of one sample, over which BatchNorm cannot normalise, joins the one before.
    """
    samples = len(x_BX)
    size = max(-(-samples // count), min(samples, 2 if count > 1 else 1))
    first = 0
    while first < samples:
        end = min(first + size, samples)
        if count > 1 and samples - end == 1:
            end = samples
        yield Part(first, samples), x_BX[first:end], y_BY[first:end]
        first = end


class Backprop:
    """Plain backpropagation of the concatenated network, from the chain's own initial weights.

    Args:
        workers: The modules' specs, head first; each keeps its own optimizer and schedule.
        device: Its device; batches may be on another one.
    """

    def __init__(self, workers: Sequence[WorkerSpec], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        modules, self._random_states = [], []
        for worker in workers:
            with seeded(module_seed(worker.seed, worker.index)) as state:
                module = build_module(worker, self.device)
                self._random_states.append(state())
            modules.append(module.requires_grad_(not worker.freeze))
        self.model = nn.Sequential(*modules)
        tail = workers[-1]
        self.loss = ChainLoss(tail.loss, tail.prediction, tail.label).to(self.device)
        self._optimizations = [
            Optimization(worker, module) for worker, module in zip(workers, modules, strict=True)
        ]
        self._micro_batches = 1 if workers[0].head is None else workers[0].head.micro_batches

    def train_batch(self, x_BX: Tensor, y_BY: Tensor) -> Tensor:
        """Train on one batch; return the loss."""
        total = torch.zeros((), device=self.device)
        x_BX, y_BY = x_BX.to(self.device), y_BY.to(self.device)
        for part, x, y in parts_of(x_BX, y_BY, self._micro_batches):
            loss: Tensor = self.loss(self._forward(x), y)
            if len(x) != part.samples:
                loss = loss * (len(x) / part.samples)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
            total += loss.detach()
        for optimization in self._optimizations:
            optimization.update()
            optimization.end_batch()
        return total

    def _forward(self, x: Tensor) -> Tensor:
        """Compute the output; each module draws its own random numbers, as it does in a chain."""
        before = torch.get_rng_state()
        for index, module in enumerate(self.model):
            torch.set_rng_state(self._random_states[index])
            x = module(x)
            self._random_states[index] = torch.get_rng_state()
        torch.set_rng_state(before)
        return x

    def end_epoch(self) -> None:
        """Step the schedules that count epochs."""
        for optimization in self._optimizations:
            optimization.end_epoch()

    def predict(self, x_BX: Tensor) -> Tensor:
        """Return the network's output in eval mode, on the batch's device."""
        self.model.eval()
        try:
            with torch.no_grad():
                return cast("Tensor", self.model(x_BX.to(self.device)).to(x_BX.device))
        finally:
            self.model.train()
