"""A user's network taken apart: where to cut it, what the modules are, and the chain file of it."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dni_runtime.core.interfaces import Boundary, default_interface
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.piece import Section, row_width
from dni_runtime.core.program import Program
from dni_runtime.core.resolve import DEFAULT_OPTIMIZER
from dni_runtime.core.source import NetworkSpec, build_network
from dni_runtime.core.tracing import trace
from dni_runtime.errors import SpecError, UsageError
from dni_runtime.packing import row_of
from dni_runtime.spec import Choice, DataInfo, TensorSpec
from dni_runtime.split.balance import Balance, best_cuts
from dni_runtime.split.costs import Costs, interface_seconds
from dni_runtime.split.part import Part
from dni_runtime.split.verify import check_parts

LINKS = {"fast": 1e9, "slow": 12.5e6}
"""Bytes per second of links: within a host or over InfiniBand; over 100 Mbit/s."""


DEFAULT_LOSS = Choice(name="CrossEntropyLoss")


@dataclass(frozen=True)
class Request:
    """How a network is to be taken apart.

    Attributes:
        modules: Number of modules.
        at: Instead, the modules of the network after which to cut.
        balance: What is to be equal among the modules.
        links: Speed of the links, a key of ``LINKS``.
        batch_size: Samples in a training batch.
        loss: The chain's loss.
        interface: The gradient interface of all modules; None: chosen for each.
        threads: Compute threads of a worker.
        repeats: Measurements of each time, of which the median counts.
    """

    modules: int = 2
    at: tuple[str, ...] = ()
    balance: Balance = "time"
    links: str = "fast"
    batch_size: int = 128
    loss: Choice = DEFAULT_LOSS
    interface: Choice | None = None
    threads: int = 1
    repeats: int = 5


def take_apart(
    spec: NetworkSpec, network: nn.Module, info: DataInfo, wanted: Request
) -> list[Part]:
    """Choose the cuts of a network, and describe its parts.

    Args:
        spec: The network.
        network: The network itself, with its weights.
        info: The data.
        wanted: What is asked for.

    Raises:
        SpecError: It cannot be traced or cut so; or its parts do not compute what it computes.
    """
    program = trace(spec)
    batch = [_batch(one, wanted.batch_size) for one in spec.example]
    state = copy.deepcopy(network.state_dict())  # with its versions
    with _threads(wanted.threads), torch.random.fork_rng(devices=[]):
        costs = Costs(program, network, batch, wanted.repeats)
        network.load_state_dict(state)
        plan = _Plan(program, costs, info, wanted)
        ends = plan.named(wanted.at) if wanted.at else plan.best()
        parts = plan.parts(ends)
        check_parts(program, network, batch, parts)
        network.load_state_dict(state)
    return parts


class _Plan:
    """The costs of modules, with their gradient interfaces."""

    def __init__(self, program: Program, costs: Costs, info: DataInfo, wanted: Request) -> None:
        self._program, self._costs, self._wanted = program, costs, wanted
        (output,) = (node for node in program.train.graph.nodes if node.op == "output")
        (last,) = output.all_input_nodes
        prediction = program.train.sample(last)
        if isinstance(prediction, str):
            raise SpecError(f"{program.spec.target}: the output {prediction}")
        scores = ChainLoss(wanted.loss, prediction, info.label, ("loss",)).scores
        classes = scores if info.classes is None else info.classes
        self._boundary = Boundary(
            prediction, info.label, prediction, classes, wanted.loss, DEFAULT_OPTIMIZER
        )
        self._interfaces: dict[tuple[str, TensorSpec], float] = {}

    def named(self, at: Sequence[str]) -> list[int]:
        """Return the cuts of some names, as numbers of segments before them.

        Raises:
            SpecError: There is no such cut, or they are not in order.
        """
        positions = [self._program.cut(name).position for name in at]
        if positions != sorted(set(positions)):
            raise SpecError(f"'--at {','.join(at)}' is not the order in which the network runs")
        ends = [one.end.position if one.end else -1 for one in self._costs.segments]
        return [1 + ends.index(position) for position in positions]

    def best(self) -> list[int]:
        """Return the best cuts, as numbers of segments before them.

        Raises:
            SpecError: The network has fewer segments than modules are wanted.
        """
        count = len(self._costs.segments)
        if self._wanted.modules > count:
            raise SpecError(
                f"{self._program.spec.target} can be cut in {count - 1} places, so that it has at "
                f"most {count} modules, not {self._wanted.modules}"
            )
        byte_s = LINKS[self._wanted.links]
        links = [bytes / byte_s / self._seconds(0, count) for bytes in self._costs.traffic]
        if self._wanted.balance == "memory":
            links = [0.0] * count
        return best_cuts(
            count, self._wanted.modules, self._cost, self._costs.traffic, lambda j: links[j - 1]
        )

    def _cost(self, i: int, j: int) -> float:
        """Share of the whole network's time or memory."""
        count, balance = len(self._costs.segments), self._wanted.balance
        seconds = self._seconds(i, j) / self._seconds(0, count)
        memory = self._costs.memory(i, j) / self._costs.memory(0, count)
        return {"time": seconds, "memory": memory, "both": max(seconds, memory)}[balance]

    def _seconds(self, i: int, j: int) -> float:
        return self._costs.seconds(i, j) + self._interface_seconds(i, j)

    def _interface(self, i: int, j: int) -> Choice | None:
        last = j == len(self._costs.segments)
        return None if last else self._chosen(self._costs.attends(i, j))

    def _chosen(self, attends: bool) -> Choice:
        return self._wanted.interface or default_interface(attends)

    def _interface_seconds(self, i: int, j: int) -> float:
        choice = self._interface(i, j)
        if choice is None:
            return 0.0
        row = row_of(self._costs.outputs(i, j))
        key = choice.model_dump_json(), row
        if key not in self._interfaces:
            boundary = replace(self._boundary, activation=row)
            self._interfaces[key] = interface_seconds(choice, boundary, self._costs.samples)
        return self._interfaces[key]

    def parts(self, ends: Sequence[int]) -> list[Part]:
        """Describe the modules between some cuts."""
        costs = self._costs
        cuts = [costs.segments[end - 1].end for end in ends]
        names = [None, *(cut.name for cut in cuts if cut is not None), None]
        sections = [
            Section.of(self._program.train, after, until) for after, until in pairwise(names)
        ]
        spans = list(pairwise([0, *ends, len(costs.segments)]))
        parameters = [costs.parameters(i, j) for i, j in spans]
        # The first part that uses a parameter has it; others borrow it.
        owner: dict[str, int] = {}
        for number, own in enumerate(parameters):
            for name in own:
                owner.setdefault(name, number)
        borrowed = [
            sorted(name for name in own if owner[name] != number)
            for number, own in enumerate(parameters)
        ]
        tied = sorted({name for some in borrowed for name in some})
        lent = [[name for name in tied if owner[name] == number] for number in range(len(spans))]
        gives = [[*section.gives, *some] for section, some in zip(sections, lent, strict=True)]
        # Where a value is: the part that gives it, and as which of its outputs.
        places: dict[Any, tuple[int, int]] = {
            value: (number, which)
            for number, values in enumerate(gives)
            for which, value in enumerate(values)
        }
        parts = []
        for number, ((i, j), section) in enumerate(zip(spans, sections, strict=True)):
            taken = sorted([*section.takes, *borrowed[number]], key=lambda one: places[one])
            own = {name: one for name, one in parameters[number].items() if owner[name] == number}
            outputs = costs.outputs(i, j) or (self._boundary.prediction,)
            outputs += tuple(
                TensorSpec(shape=(row_width(own[name], costs.samples),), dtype="float32")
                for name in lent[number]
            )
            attends = costs.attends(i, j)
            last = j == len(costs.segments)
            parts.append(
                Part(
                    name=_name(number),
                    after=names[number],
                    until=names[number + 1],
                    inputs=self._inputs([places[one] for one in taken], section, gives, number),
                    outputs=outputs,
                    numbers=sum(one.numel() for one in own.values()),
                    lends=tuple(lent[number]),
                    borrows={name: taken.index(name) for name in borrowed[number]},
                    seconds=costs.seconds(i, j),
                    interface_s=self._interface_seconds(i, j),
                    memory=costs.memory(i, j),
                    sends=0 if last else _bytes(outputs, costs.samples),
                    # A tied parameter learns by true gradients alone.
                    interface=None if last else self._chosen(attends or bool(lent[number])),
                    attends=attends,
                    samples=costs.samples,
                )
            )
        return parts

    def _inputs(
        self,
        places: Sequence[tuple[int, int]],
        section: Section,
        gives: Sequence[Sequence[Any]],
        number: int,
    ) -> tuple[str, ...] | None:
        """Return a module's inputs as in ``chain.yaml``; None if they need not be written."""
        if number == 0:
            plain = section.data == list(range(len(self._program.spec.example)))
        else:
            before = [(number - 1, which) for which in range(len(gives[number - 1]))]
            plain = places == before and not section.data
        if plain:
            return None
        modules = (
            _name(source) + (f".{which}" if len(gives[source]) > 1 else "")
            for source, which in places
        )
        return (*modules, *(f"data.{one}" for one in section.data))


def _name(number: int) -> str:
    return f"part-{number + 1}"


def network_of(
    target: str,
    info: DataInfo,
    *,
    args: Mapping[str, Any],
    takes: Sequence[str] = (),
    returns: str | None = None,
) -> tuple[NetworkSpec, nn.Module]:
    """Build a network for some data.

    Raises:
        SpecError: It cannot be built.
        UsageError: ``takes`` names more inputs than the data has.
    """
    if takes and len(takes) != len(info.samples):
        raise UsageError(
            f"{len(takes)} arguments of forward are named, and the data has {len(info.samples)} "
            "inputs"
        )
    spec = NetworkSpec.model_validate(
        {
            "import": target,
            "args": dict(args),
            "example": info.samples,
            "takes": tuple(takes),
            "returns": returns,
        }
    )
    return spec, build_network(spec).train()


def chain_name(target: str) -> str:
    """Return a chain's name for an import path."""
    name = re.sub(r"[^a-z0-9]+", "-", target.partition(":")[2].lower()).strip("-")
    return name[:40].strip("-") or "network"


def _batch(one: TensorSpec, samples: int) -> Tensor:
    """Return a batch to measure with: noise, or ones where numbers are indices or masks."""
    dtype = getattr(torch, one.dtype)
    if dtype.is_floating_point:
        return torch.randn(samples, *one.shape).to(dtype)
    return torch.ones(samples, *one.shape, dtype=dtype)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bytes(outputs: Sequence[TensorSpec], samples: int) -> int:
    row = row_of(outputs)
    size: int = getattr(torch, row.dtype).itemsize
    return samples * size * torch.Size(row.shape).numel()
