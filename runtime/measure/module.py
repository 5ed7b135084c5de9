"""The cost of each module's parts, one module at a time in this process, without any transport.

Each module gets the same inputs as in the chain: activations of the modules before it for real
batches, and true gradients of the module after it.

Shape suffixes: B samples of a batch, X a module's input, H its output, Y a label.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import torch
from torch import Tensor, nn

from dni_runtime.core.chain import inputs_of
from dni_runtime.core.forward import as_inputs
from dni_runtime.core.interfaces import Timing
from dni_runtime.core.step import ModuleStep, due
from dni_runtime.core.sums import GradientSum
from dni_runtime.data import open_data
from dni_runtime.errors import UsageError
from dni_runtime.link.contract import LinkContract
from dni_runtime.plan.prepare import CheckedChain, importing_from, prepare_again
from dni_runtime.spec.load import suggestion
from dni_runtime.worker.device import choose_device

_BATCHES = 4
"""Number of different batches, used in turns."""


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class ModuleCost:
    """Cost of one module per batch; ``…_us`` are microseconds."""

    module: str
    device: str
    threads: int
    batch: int  # samples
    forward_us: Spread
    backward_us: Spread  # with the tail's loss, and the optimizer's step
    signal_us: Spread  # the interface's signal: the synthesizer's forward pass, a local head
    learn_us: Spread  # from one late gradient; 0 if it learns from none
    learn_every: int  # every n-th batch has a late gradient to learn from; 0: none
    step_us: Spread  # all parts, on average over batches
    interface_share: float  # of step_us
    samples_per_s: float  # that a worker for this module could train at most
    parameters: int  # trainable
    interface_parameters: int  # trainable
    down_bytes: int  # activations per batch
    up_bytes: float  # gradients per batch, on average


@dataclass(frozen=True)
class _Feed:
    xs: tuple[Tensor, ...]
    y_BY: Tensor
    g_BH: Tensor


@dataclass
class _Sums:
    """Seconds of each part in one repetition, and how often it ran."""

    forward_s: float = 0.0
    update_s: float = 0.0
    signal_s: float = 0.0
    late_s: float = 0.0
    batches: int = 0
    late: int = 0


def measure_modules(
    prepared: CheckedChain,
    modules: Sequence[str] = (),
    *,
    repetitions: int,
    seconds: float,  # at least, for each repetition
    observe: Callable[[str], None] | None = None,  # gets a line after each measurement
) -> list[ModuleCost]:
    """Measure the modules of a chain in turns, by default all."""
    for name in modules:
        if name not in prepared.modules:
            raise UsageError(
                f"{prepared.locate('modules')}: there is no module {name!r}",
                hint=suggestion(name, prepared.modules),
            )
    prepared = _without_schedules(prepared)
    with importing_from(prepared.base.absolute()):
        steps = [ModuleStep(worker, choose_device(worker)) for worker in prepared.workers]
        feeds = _feeds(prepared, steps)
        indices = [k for k, name in enumerate(prepared.modules) if not modules or name in modules]
        measured: dict[int, list[_Sums]] = {index: [] for index in indices}
        for repetition in range(repetitions):
            for index in indices:
                torch.set_num_threads(steps[index].spec.cpus)
                _measure(steps[index], feeds[index], seconds / 4)  # warm-up
                measured[index].append(_measure(steps[index], feeds[index], seconds))
                if observe is not None:
                    observe(f"{repetition + 1}/{repetitions} {prepared.modules[index]}")
    return [_cost(steps[index], measured[index], len(feeds[0][0].y_BY)) for index in indices]


def _without_schedules(prepared: CheckedChain) -> CheckedChain:
    """Return the chain without schedules, some of which end after a number of batches."""
    chain, none = prepared.written, {"schedule": None, "schedule_every": None}
    update = {
        "defaults": chain.defaults.model_copy(update=none),
        "modules": tuple(module.model_copy(update=none) for module in chain.modules),
    }
    return prepare_again(prepared, chain.model_copy(update=update))


def _feeds(prepared: CheckedChain, steps: Sequence[ModuleStep]) -> list[list[_Feed]]:
    """Return inputs, labels and true gradients of all modules, for a few real batches."""
    chain = prepared.chain
    source = open_data(chain.data.at(prepared.data).of_replica(1), prepared.base, seed=chain.seed)
    feeds: list[list[_Feed]] = [[] for _ in steps]
    sources = chain.graph.sources
    for id, (x, y_BY) in enumerate(islice(source.train_batches(1), _BATCHES), start=1):
        if feeds[0] and len(y_BY) != len(feeds[0][0].y_BY):
            break  # the last one of a small data set
        inputs: list[tuple[Tensor, ...]] = []
        outputs: list[Tensor] = []
        gradients = [GradientSum(len(step.spec.targets), step.spec.outputs) for step in steps]
        sums: dict[int, Tensor] = {}
        for index, step in enumerate(steps):
            values = inputs_of(prepared.workers, index, outputs, as_inputs(x))
            inputs.append(tuple(tensor.to(step.device) for tensor in values))
            every = math.lcm(*(max(edge.gradients, 1) for edge in step.spec.sources))
            outputs.append(step.forward(id * every, inputs[-1]))
            upstream = step.update(y_BY.to(step.device))
            edges = step.spec.sources
            for above, edge, g_BX in zip(sources[index], edges, upstream, strict=False):
                # A module that defers its update has no gradient yet for the previous ones.
                if g_BX is not None:
                    total = gradients[above].add(id, index, g_BX.cpu(), edge.takes)
                    sums |= {} if total is None else {above: total}
        for index, step in enumerate(steps):
            step.give_up_waiting()
            g_BH = sums.get(index, torch.zeros_like(outputs[index]))
            y = y_BY.to(step.device)
            feeds[index].append(_Feed(inputs[index], y, g_BH.to(step.device)))
    return feeds


def _measure(step: ModuleStep, feeds: Sequence[_Feed], seconds: float) -> _Sums:
    """Train one module for a while, a round of batches at a time."""
    clock = _clock(step.device)
    spec, interface, sums = step.spec, step.interface, _Sums()
    # Whole rounds, so that batches with gradients occur as often as in training.
    sent = (max(edge.gradients, 1) for edge in spec.sources)
    round_ids = math.lcm(_BATCHES, max(spec.gradients_in, 1), *sent)
    first, until = 1, time.perf_counter() + seconds
    while time.perf_counter() < until:
        for id in range(first, first + round_ids):
            feed = feeds[id % len(feeds)]
            step.measure_late = False  # the workers do so once a second
            began = clock()
            h_BH = step.forward(id, feed.xs)
            forward = clock()
            step.update(feed.y_BY)
            updated = clock()
            sums.forward_s += forward - began
            sums.update_s += updated - forward
            if interface is not None and interface.timing.signals:
                interface.signal(h_BH, feed.y_BY)
                sums.signal_s += clock() - updated
            if due(id, spec.gradients_in):
                late = clock()
                step.late_gradient(id, feed.g_BH)
                sums.late_s += clock() - late
                sums.late += 1
            sums.batches += 1
        first += round_ids
    return sums


def _clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that waits for the device to finish its work."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _cost(step: ModuleStep, measured: Sequence[_Sums], batch: int) -> ModuleCost:
    spec, interface = step.spec, step.interface
    deferred = interface is not None and interface.timing is Timing.DEFERRED
    forward = [1e6 * sums.forward_s / sums.batches for sums in measured]
    signal = [1e6 * sums.signal_s / sums.batches for sums in measured]
    update = [1e6 * sums.update_s / sums.batches for sums in measured]
    late = [1e6 * sums.late_s / sums.late if sums.late else 0.0 for sums in measured]
    every = 0 if deferred else spec.gradients_in
    # The update includes the signal; a deferred update runs in the late gradient's part.
    backward = [
        a + b if deferred else max(a - c, 0.0) for a, b, c in zip(update, late, signal, strict=True)
    ]
    learn = [0.0] * len(late) if deferred else late
    share = 1 / every if every else 0.0
    total = [
        f + b + s + share * lt for f, b, s, lt in zip(forward, backward, signal, learn, strict=True)
    ]
    interfaces = [(s + share * lt) / t for s, lt, t in zip(signal, learn, total, strict=True)]
    step_us = Spread.of(total)
    return ModuleCost(
        module=spec.module,
        device=str(step.device),
        threads=spec.cpus,
        batch=batch,
        forward_us=Spread.of(forward),
        backward_us=Spread.of(backward),
        signal_us=Spread.of(signal),
        learn_us=Spread.of(learn),
        learn_every=every,
        step_us=step_us,
        interface_share=Spread.of(interfaces).median,
        samples_per_s=batch / step_us.median * 1e6,
        parameters=_count(step.layers),
        interface_parameters=0 if interface is None else _count(interface),
        down_bytes=_down_bytes(step, batch),
        up_bytes=_up_bytes(step, batch),
    )


def _down_bytes(step: ModuleStep, batch: int) -> int:
    links = [LinkContract.of(step.spec, edge) for edge in step.spec.targets]
    return batch * sum(tensor.sample_bytes for link in links for tensor in link.tensors[:-1])


def _up_bytes(step: ModuleStep, batch: int) -> float:
    links = [(LinkContract.of(step.spec, edge), edge.gradients) for edge in step.spec.sources]
    return sum((it.gradient.sample_bytes * batch / n for it, n in links if it.gradient), 0.0)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
