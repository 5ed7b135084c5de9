"""What the operations between two cuts cost: time, memory, and bytes that pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dni_runtime.core.attention import AttentionWatch, run_watched
from dni_runtime.core.backward import changed_in_place
from dni_runtime.core.interfaces import Boundary, build_interface, resolve_interface
from dni_runtime.core.training import build_optimizer
from dni_runtime.network.piece import Operations
from dni_runtime.network.program import Cut, Program, Section
from dni_runtime.resolve.resolve import DEFAULT_OPTIMIZER
from dni_runtime.spec import Choice, TensorSpec

_COPIES = 4
"""Copies of a trained parameter: itself, its gradient, and Adam's two averages."""


@dataclass(frozen=True)
class Segment:
    """The operations between two neighbouring cuts."""

    end: Cut | None  # None: the last segment
    seconds: float  # of one training batch: forward, backward, and a step of Adam
    parameters: dict[str, nn.Parameter]
    saved: int  # bytes that autograd keeps of a batch
    # Number of the segment in which a module that begins with this one meets attention; infinite if
    # it never does.
    attends: float


class Costs:
    """What modules would cost that begin and end at any two cuts."""

    def __init__(
        self,
        program: Program,
        network: nn.Module,
        batch: Sequence[Tensor],
        repeats: int,
    ) -> None:
        self.samples = len(batch[0])
        possible = [cut for cut in program.cuts.values() if cut.reason is None]
        at = {cut.position: cut for cut in possible}
        ends = [at[position] for position in sorted(at)]
        self.segments = measure(program, network, batch, [*ends, None], repeats)

    @cached_property
    def traffic(self) -> list[float]:
        """Bytes that pass a cut after each segment, with a batch and its gradient."""
        return [2.0 * self.samples * bytes_of(cut.values) if cut else 0.0 for cut in self._ends]

    @property
    def _ends(self) -> list[Cut | None]:
        return [segment.end for segment in self.segments]

    def seconds(self, i: int, j: int) -> float:
        """Time of a batch in the module of segments ``i`` to ``j - 1``, without its interface."""
        return sum(segment.seconds for segment in self.segments[i:j])

    def memory(self, i: int, j: int) -> float:
        """Bytes of weights, gradients, Adam's averages and one batch in that module."""
        weights = sum(
            (_COPIES if one.requires_grad else 1) * one.nbytes
            for one in self.parameters(i, j).values()
        )
        return weights + sum(segment.saved for segment in self.segments[i:j])

    def parameters(self, i: int, j: int) -> dict[str, nn.Parameter]:
        """Parameters of that module by name."""
        return {
            name: parameter
            for segment in self.segments[i:j]
            for name, parameter in segment.parameters.items()
        }

    def trains(self, j: int) -> bool:
        """Whether any parameter before segment ``j`` is trained."""
        return any(one.requires_grad for one in self.parameters(0, j).values())

    def attends(self, i: int, j: int) -> bool:
        """Whether there is attention in that module."""
        return self.segments[i].attends < j

    def outputs(self, i: int, j: int) -> tuple[TensorSpec, ...]:
        """One sample of each value that that module computes and others take."""
        end, begin = self.segments[j - 1].end, self.segments[i - 1].end if i else None
        if end is None:
            return ()
        first = -1 if begin is None else begin.position
        pairs = zip(end.values, end.made, strict=True)
        return tuple(value for value, made in pairs if made > first)


def _before(cut: str | None) -> str:
    return "what comes after the last cut" if cut is None else f"what comes before the cut {cut!r}"


def measure(
    program: Program,
    network: nn.Module,
    batch: Sequence[Tensor],
    ends: Sequence[Cut | None],  # None: the network's output
    repeats: int,
) -> list[Segment]:
    """Run a network segment by segment, in train mode, and measure each.

    The network's weights and buffers change, as in training. The fastest of ``repeats``
    measurements counts: other programs only take time.
    """
    names = [None, *(cut.name for cut in ends if cut is not None), None]
    sections = [Section.of(program.train, after, until) for after, until in pairwise(names)]
    constants = nn.Module()
    runs = [Operations(program.train, section, network, constants) for section in sections]
    parameters = dict(network.named_parameters(remove_duplicate=False))
    per_section = [_parameters(program, section, parameters) for section in sections]
    optimizers, updated = [], set[nn.Parameter]()
    for (
        tensors
    ) in per_section:  # a tied one is updated where it is used first: its gradient is whole
        trained = [p for p in tensors.values() if p.requires_grad and p not in updated]
        updated.update(trained)
        optimizers.append(build_optimizer(DEFAULT_OPTIMIZER, trained) if trained else None)
    times: list[list[float]] = [[] for _ in runs]
    saved = [0] * len(runs)
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
    for repeat in range(repeats + 1):  # the first one warms up
        values: dict[Any, Tensor] = {}
        learning: set[Any] = set()  # values that something trained has made
        passes: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
        seconds = []
        for number, (section, run) in enumerate(zip(sections, runs, strict=True)):
            # Copies, as from a link: what is changed in place is not what the one before has kept.
            inputs = [
                values[node].clone().requires_grad_(node in learning) for node in section.takes
            ]
            inputs += [batch[place] for place in section.data]
            kept: dict[int, int] = {}

            def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            if repeat == 0:
                with saved_tensors_hooks(keep, lambda tensor: tensor):
                    outputs = run(*inputs)
                saved[number] = sum(kept.values())
            began = time.perf_counter()
            outputs = run(*inputs)
            seconds.append(time.perf_counter() - began)
            passes.append((inputs, outputs))
            learning |= {
                node for node, y in zip(section.gives, outputs, strict=True) if y.requires_grad
            }
            values |= zip(section.gives, (one.detach() for one in outputs), strict=True)
        gradients = {node: torch.ones_like(values[node]) for node in sections[-1].gives}
        for number in reversed(range(len(runs))):
            section, (inputs, outputs) = sections[number], passes.pop()
            learnt = [
                (output, gradients[node])
                for node, output in zip(section.gives, outputs, strict=True)
                if output.requires_grad and node in gradients
            ]
            began = time.perf_counter()
            if learnt:
                try:
                    torch.autograd.backward([y for y, _ in learnt], [g for _, g in learnt])
                except RuntimeError as error:
                    raise changed_in_place(_before(names[number + 1]), error) or error from None
            for parameter in per_section[number].values():
                if (
                    parameter.grad is not None and parameter.grad.is_sparse
                ):  # which Adam does not take
                    parameter.grad = parameter.grad.to_dense()
            if (optimizer := optimizers[number]) is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            times[number].append(seconds[number] + time.perf_counter() - began)
            for node, x in zip(section.takes, inputs, strict=False):  # then the data's
                if x.grad is not None:
                    gradients[node] = gradients[node] + x.grad if node in gradients else x.grad
    network.zero_grad(set_to_none=True)
    attends = _attending(network, sections, runs, values, batch)
    return [
        Segment(end, min(times[number][1:]), per_section[number], saved[number], attends[number])
        for number, end in enumerate(ends)
    ]


def _attending(
    network: nn.Module,
    sections: Sequence[Section],
    runs: Sequence[Operations],
    values: Mapping[Any, Tensor],
    batch: Sequence[Tensor],
) -> list[float]:
    """For each segment, return in which one a module that begins with it meets attention.

    A module's inputs are activations, whatever they come from, as when it is built.
    """
    attention: list[float] = []
    for first in range(len(runs)):
        attention.append(math.inf)
        if first and attention[first - 1] == math.inf:
            continue  # nor is there any later
        watch, computed = AttentionWatch(batch), dict[Any, Tensor]()
        for number in range(first, len(runs)):
            section = sections[number]
            inputs = [computed.get(node, values[node]) for node in section.takes]
            watch.take(inputs)
            inputs += [batch[place] for place in section.data]
            modules = (network.get_submodule(path) for path in section.paths)
            computed |= zip(
                section.gives, run_watched(runs[number], inputs, watch, modules), strict=True
            )
            if watch.attends:
                attention[first] = number
                break
    return attention


def _parameters(
    program: Program, section: Section, parameters: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    nodes = (node.name for node in section.tensors)
    names = {program.train.names[name] for name in nodes if name in program.train.names}
    return {name: parameters[name] for name in sorted(names) if name in parameters}


def interface_seconds(choice: Choice, boundary: Boundary, samples: int) -> float:
    """Measure the time that a gradient interface takes for a batch."""
    resolved = resolve_interface(choice)
    interface = build_interface(choice, boundary)
    h_BH = torch.rand(samples, *boundary.activation.shape)
    y_BY = torch.zeros(samples, *boundary.label.shape, dtype=getattr(torch, boundary.label.dtype))
    g_BH = torch.rand_like(h_BH)
    seconds = 0.0
    if resolved.timing.signals:
        seconds += _fastest(lambda: interface.signal(h_BH, y_BY))
    if resolved.needs.every:
        learning = _fastest(lambda: interface.learn(h_BH, y_BY, g_BH, measure=False))
        seconds += learning / resolved.needs.every
    return seconds


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def bytes_of(values: Sequence[TensorSpec]) -> int:
    return sum(prod(value.shape) * getattr(torch, value.dtype).itemsize for value in values)
