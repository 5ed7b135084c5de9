"""A whole chain in one process, without sockets: the reference for the distributed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from dni_runtime.core.layers import build_layers
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.step import ModuleStep, seeded
from dni_runtime.core.training import build_optimizer, build_schedule, module_seed
from dni_runtime.spec import WorkerSpec

Carry: TypeAlias = Callable[[int, Tensor], Tensor]
"""What arrives of a tensor that crosses the cut below the module with this index."""


def _unchanged(cut: int, tensor: Tensor) -> Tensor:
    return tensor


class LocalChain:
    """Modules that hand their tensors to each other directly.

    Args:
        workers: The modules' specs, head first.
        delay: Training batches by which each true gradient is late at the module it teaches; 0
            hands it over as soon as the module downstream has it.
        down: What a cut does to activations, such as narrowing them.
        up: What it does to gradients.
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        *,
        delay: int = 0,
        down: Carry = _unchanged,
        up: Carry = _unchanged,
    ) -> None:
        self.steps = [ModuleStep(worker) for worker in workers]
        self._late: list[deque[tuple[int, Tensor]]] = [deque() for _ in workers]
        self._delay = delay
        self._down = down
        self._up = up
        self._id = 0

    def train_batch(self, x_BX: Tensor, y_BY: Tensor) -> float:
        """Train every module on one batch.

        Returns:
            The tail's loss.
        """
        self._id += 1
        for index, step in enumerate(self.steps):
            self._teach(index)
            if index:
                x_BX = self._down(index - 1, x_BX)
            before = torch.get_rng_state()
            torch.set_rng_state(step.random_state)  # dropout draws as it would in its own process
            x_BX = step.forward(self._id, x_BX)
            step.random_state = torch.get_rng_state()
            torch.set_rng_state(before)
            self._pass_up(index, self._id, step.update(y_BY))
        for index in range(len(self.steps) - 1, -1, -1):
            self._teach(index)
        loss = self.steps[-1].counters.loss
        assert loss is not None
        return float(loss)

    def end_epoch(self) -> None:
        """Step the schedules that count epochs."""
        for step in self.steps:
            step.end_epoch()

    def predict(self, x_BX: Tensor) -> Tensor:
        """The chain's output in eval mode."""
        for index, step in enumerate(self.steps):
            if index:
                x_BX = self._down(index - 1, x_BX)
            x_BX = step.evaluate(x_BX)
        return x_BX

    def _pass_up(self, index: int, id: int, g_BX: Tensor | None) -> None:
        if g_BX is not None and index > 0:
            self._late[index - 1].append((id, self._up(index - 1, g_BX)))

    def _teach(self, index: int) -> None:
        late = self._late[index]
        while late and late[0][0] <= self._id - self._delay:
            id, g_BH = late.popleft()
            self._pass_up(index, id, self.steps[index].late_gradient(id, g_BH))


class Backprop:
    """Plain backpropagation of the concatenated network, from the chain's own initial weights.

    Args:
        workers: The modules' specs, head first; each keeps its own optimizer and schedule.
        device: Where it computes; batches may lie elsewhere.
    """

    def __init__(self, workers: Sequence[WorkerSpec], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        modules = []
        for worker in workers:
            with seeded(module_seed(worker.seed, worker.index)):
                modules.append(build_layers(worker.layers, ("layers",)).to(self.device))
        self.model = nn.Sequential(*modules)
        tail = workers[-1]
        self.loss = ChainLoss(tail.loss, tail.prediction, tail.label).to(self.device)
        self.optimizers = []
        self._schedules: dict[str, list[LRScheduler]] = {"epoch": [], "batch": []}
        for worker, module in zip(workers, modules, strict=True):
            if not any(p.requires_grad for p in module.parameters()):
                continue
            optimizer = build_optimizer(worker.optimizer, module.parameters())
            self.optimizers.append(optimizer)
            if worker.schedule is not None:
                schedule = build_schedule(worker.schedule, optimizer)
                self._schedules[worker.schedule_every].append(schedule)

    def train_batch(self, x_BX: Tensor, y_BY: Tensor) -> Tensor:
        """One step; gives the loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.loss(self.model(x_BX.to(self.device)), y_BY.to(self.device))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self._schedules["batch"]:
            schedule.step()
        return loss.detach()

    def end_epoch(self) -> None:
        """Step the schedules that count epochs."""
        for schedule in self._schedules["epoch"]:
            schedule.step()

    def predict(self, x_BX: Tensor) -> Tensor:
        """The network's output in eval mode, where the batch lies."""
        self.model.eval()
        try:
            with torch.no_grad():
                return cast("Tensor", self.model(x_BX.to(self.device)).to(x_BX.device))
        finally:
            self.model.train()
