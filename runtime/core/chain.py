"""A whole chain in one process, without sockets: the reference for the distributed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dni_runtime.core.forward import Inputs, ModuleForward, as_inputs
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.step import Gradients, ModuleStep
from dni_runtime.core.sums import GradientSum
from dni_runtime.packing import taken
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Part

Carry: TypeAlias = Callable[[int, Tensor], Tensor]
"""Returns a tensor as it arrives across the cut below the module with this index."""


def _unchanged(cut: int, tensor: Tensor) -> Tensor:
    return tensor


class _OneProcess:
    """What both trainings in one process have: the modules, and how they are evaluated."""

    steps: list[ModuleStep]
    device: torch.device
    _down: Carry

    def _placed(self, x: Inputs, y_BY: Tensor) -> tuple[Inputs, Tensor]:
        """Return a batch on the modules' device."""
        return tuple(tensor.to(self.device) for tensor in as_inputs(x)), y_BY.to(self.device)

    def end_epoch(self) -> None:
        """Step the schedules that count epochs."""
        for step in self.steps:
            step.optimization.end_epoch()

    def predict(self, x: Inputs) -> Tensor:
        """Return the network's output in eval mode, on the batch's device."""
        xs = as_inputs(x)
        placed = tuple(x.to(self.device) for x in xs)
        return predict(self.steps, placed, self._down).to(xs[0].device)

    def end_evaluation(self) -> None:
        """End an evaluation: recurrent layers start the next one with zeros."""
        for step in self.steps:
            step.end_evaluation()


class LocalChain(_OneProcess):
    """Modules that hand their tensors to each other directly.

    Gradients come ``delay`` training batches late to modules' outputs: one number for all, or one
    for each; delays add up module by module, as they do between workers. ``down`` and ``up`` change
    activations and gradients at a cut, such as narrowing them. Module number ``at`` computes, or
    did last. All modules share one device; batches may be on another one.
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        *,
        delay: int | Sequence[int] = 0,
        down: Carry = _unchanged,
        up: Carry = _unchanged,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        cuts = len(workers) - 1
        self._delays = [delay] * cuts if isinstance(delay, int) else list(delay)
        if len(self._delays) != cuts:
            raise ValueError(f"{len(self._delays)} delays for {cuts} links")
        self._micro_batches = 1 if workers[0].head is None else workers[0].head.micro_batches
        self.steps = []
        for index, worker in enumerate(workers):  # stores must not limit delays
            late = max(worker.late, sum(self._delays[index:]) * self._micro_batches)
            self.steps.append(ModuleStep(worker.model_copy(update={"late": late}), self.device))
        self._workers = workers
        numbers = {worker.module: index for index, worker in enumerate(workers)}
        self._sources = [
            [numbers[edge.source] for edge in worker.sources if edge.tensor] for worker in workers
        ]
        targets = [[edge for edge in worker.targets if edge.tensor] for worker in workers]
        outputs = [worker.outputs for worker in workers]
        self._sums = [GradientSum(len(edges), outputs[at]) for at, edges in enumerate(targets)]
        self._late: list[deque[tuple[int, int, Tensor]]] = [deque() for _ in workers]
        self._down, self._up = down, up
        self._now = self._id = self.at = 0

    def train_batch(self, x: Inputs, y_BY: Tensor) -> Tensor:
        """Train every module on one batch; return the tail's loss."""
        self._now += 1
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        x, y_BY = self._placed(x, y_BY)
        for part, some, y in parts_of(x, y_BY, self._micro_batches, self.steps[-1].loss):
            self._id += 1
            outputs: list[Tensor] = []
            for index, step in enumerate(self.steps):
                self.at = index
                before = torch.get_rng_state()
                torch.set_rng_state(step.random_state)  # as in a process of its own
                inputs = inputs_of(self._workers, index, outputs, as_inputs(some), self._down)
                outputs.append(step.forward(self._id, inputs, part))
                gradients = step.update(y)  # a local head may draw, too
                step.random_state = torch.get_rng_state()
                torch.set_rng_state(before)
                self._pass_up(index, self._id, gradients)
            self._deliver()
            tail_loss = self.steps[-1].counters.loss
            assert tail_loss is not None
            loss += tail_loss * len(y) / len(y_BY)
        # modules wait for gradients, unless none is on its way
        while any(step.blocked for step in self.steps) and any(self._late):
            self._now += 1
            self._deliver()
        return loss

    def _pass_up(self, index: int, id: int, gradients: Gradients) -> None:
        edges = self.steps[index].spec.sources
        for source, edge, g_BX in zip(self._sources[index], edges, gradients, strict=False):
            if g_BX is not None:
                above = self.steps[source].spec
                place = [link.target for link in above.targets].index(edge.target)
                total = self._sums[source].add(id, place, self._up(source, g_BX), edge.takes)
                if total is not None:
                    due = self._now + self._delays[source]
                    self._late[source].append((due, id, total))

    def _deliver(self) -> None:
        """Hand over the gradients that have arrived."""
        for index in range(len(self.steps) - 1, -1, -1):
            late = self._late[index]
            while late and late[0][0] <= self._now:
                _, id, g_BH = late.popleft()
                self.at = index
                self._pass_up(index, id, self.steps[index].late_gradient(id, g_BH))


def data_of(worker: WorkerSpec) -> tuple[int, ...]:
    """Return which inputs of the data a module takes."""
    if worker.head is not None:
        return worker.head.takes
    return tuple(number for edge in worker.sources for number in edge.data)


def inputs_of(
    workers: Sequence[WorkerSpec],
    index: int,
    outputs: Sequence[Tensor],
    data: Sequence[Tensor],
    down: Carry = _unchanged,
) -> tuple[Tensor, ...]:
    """Return a module's inputs of a batch, those of the data last."""
    activations = [
        down(number, taken(h_BH, above.outputs, edge))
        for edge in workers[index].sources
        for number, (above, h_BH) in enumerate(zip(workers, outputs, strict=False))
        if edge.tensor and above.module == edge.source
    ]
    return (*activations, *(data[number] for number in data_of(workers[index])))


def predict(modules: Sequence[ModuleForward], x: Inputs, down: Carry = _unchanged) -> Tensor:
    """Return the output of modules, head first, in eval mode."""
    return activations(modules, x, down)[-1]


def activations(
    modules: Sequence[ModuleForward], x: Inputs, down: Carry = _unchanged
) -> list[Tensor]:
    """Return the output of each module, head first, in eval mode."""
    workers, outputs = [module.spec for module in modules], list[Tensor]()
    for index, module in enumerate(modules):
        outputs.append(module.evaluate(inputs_of(workers, index, outputs, as_inputs(x), down)))
    return outputs


def part_sizes(samples: int, count: int) -> list[int]:
    """Return the sizes of ``count`` parts of a batch, or of as many as it has pairs of samples.

    A last part of one sample, over which BatchNorm cannot normalise, joins the one before.
    """
    size = max(-(-samples // count), min(samples, 2 if count > 1 else 1))
    sizes = [min(size, samples - first) for first in range(0, samples, size or 1)]
    if count > 1 and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [size + 1]
    return sizes


def parts_of(
    x: Inputs, y_BY: Tensor, count: int, loss: ChainLoss | None = None
) -> Iterator[tuple[Part, Inputs, Tensor]]:
    """Cut a training batch into parts; see :func:`part_sizes`.

    ``loss`` weighs the parts by their labels; None: somebody else does, who has the labels.
    """
    first, samples = 0, len(y_BY)
    for size in part_sizes(samples, count):
        end = first + size
        some, y = tuple(tensor[first:end] for tensor in as_inputs(x)), y_BY[first:end]
        shares = () if loss is None or count == 1 else loss.shares(y, y_BY)
        yield Part(first, samples, shares), some if isinstance(x, tuple) else some[0], y
        first = end


class Backprop(_OneProcess):
    """Plain backpropagation of the concatenated network, from the chain's own initial weights.

    Each module has the settings that it has in the chain, but for its gradient interface and its
    replicas: what is trained, optimizers, averages, precision. Batches may be on another device.
    """

    def __init__(self, workers: Sequence[WorkerSpec], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        alone: dict[str, Any] = {"interface": None, "strategy": None, "lr_scale": 1.0}
        alone |= {"replica": 1, "replicas": 1, "elastic": {}}
        self.steps = [
            ModuleStep(worker.model_copy(update=alone), self.device) for worker in workers
        ]
        self.model = nn.ModuleList(step.layers for step in self.steps)
        self.loss = self.steps[-1].loss
        self._workers, self._down = workers, _unchanged
        self._micro_batches = 1 if workers[0].head is None else workers[0].head.micro_batches

    def train_batch(self, x: Inputs, y_BY: Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        x, y_BY = self._placed(x, y_BY)
        for part, some, y in parts_of(x, y_BY, self._micro_batches, self.loss):
            loss = self._loss(self._forward(some), y, part)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
            total += loss.detach()
        for step in self.steps:
            step.optimization.update()
            step.optimization.end_batch()
        return total

    def _loss(self, outputs: Sequence[Tensor], y_BY: Tensor, part: Part) -> Tensor:
        """Return what is minimized, of the modules' outputs."""
        return self.loss.of_part(outputs[-1], y_BY, part)

    def _forward(self, x: Inputs) -> list[Tensor]:
        """Compute all outputs; each module draws its own random numbers, as it does in a chain."""
        data = as_inputs(x)
        before = torch.get_rng_state()
        outputs: list[Tensor] = []
        for index, step in enumerate(self.steps):
            torch.set_rng_state(step.random_state)
            inputs = inputs_of(self._workers, index, outputs, data)
            # Views: a loss scale is divided out at each module's own input.
            outputs.append(step.activation(tuple(tensor.view_as(tensor) for tensor in inputs)))
            step.random_state = torch.get_rng_state()
        torch.set_rng_state(before)
        return outputs
