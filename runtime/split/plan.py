"""Where a network is to be cut, by the costs of modules with their gradient interfaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

from torch import Tensor, nn

from dni_runtime.core.chain import part_sizes
from dni_runtime.core.interfaces import Boundary, default_interface, resolve_interface
from dni_runtime.core.losses import ChainLoss, sum_of
from dni_runtime.errors import SpecError, UsageError
from dni_runtime.network.piece import row_width
from dni_runtime.network.program import Program, Section
from dni_runtime.packing import row_of
from dni_runtime.resolve.resolve import DEFAULT_OPTIMIZER
from dni_runtime.spec import Choice, DataInfo, LossSpec, TensorSpec
from dni_runtime.split.balance import Balance, best_cuts
from dni_runtime.split.costs import Costs, bytes_of, interface_seconds
from dni_runtime.split.part import NetworkPart
from dni_runtime.split.verify import check_parts

LINKS = {"fast": 1e9, "slow": 12.5e6}
"""Bytes per second of links: within a host or over InfiniBand; over 100 Mbit/s."""


DEFAULT_LOSS = Choice(name="CrossEntropyLoss")


@dataclass(frozen=True)
class SplitRequest:
    """How a network is to be taken apart."""

    modules: int = 2
    at: tuple[str, ...] = ()  # instead, the modules of the network after which to cut
    balance: Balance = "time"
    links: str = "fast"  # their speed, a key of ``LINKS``
    batch_size: int = 128
    loss: Choice = DEFAULT_LOSS
    losses: tuple[LossSpec, ...] | None = None  # instead, several
    labelled: bool = True  # False: labels stay at the last module
    # Of each module, or one for all; empty: chosen for each.
    interfaces: tuple[Choice | None, ...] = ()
    # Whether each module is; then no other layers come to those that are.
    frozen: tuple[bool, ...] = ()
    names: tuple[str, ...] = ()  # of the modules
    threads: int = 1  # of a worker
    repeats: int = 5  # measurements of each time, of which the fastest counts

    def __post_init__(self) -> None:
        for name, allowed in (("balance", get_args(Balance)), ("links", tuple(LINKS))):
            if (value := getattr(self, name)) not in allowed:
                words = ", ".join(map(repr, allowed))
                raise UsageError(f"{name!r} is {value!r}", hint=f"allowed: {words}")
        if not isinstance(self.modules, int) or self.modules < 1:
            raise UsageError(f"'modules' is {self.modules!r}", hint="it is a number, from 1")


class Plan:
    """The costs of modules, with their gradient interfaces."""

    def __init__(
        self,
        program: Program,
        costs: Costs,
        info: DataInfo,
        request: SplitRequest,
        batch: Sequence[Tensor],
    ) -> None:
        self.costs, self.request = costs, request
        self._program, self._batch = program, batch
        (output,) = (node for node in program.train.graph.nodes if node.op == "output")
        (last,) = output.all_input_nodes
        prediction = program.train.sample(last)
        if isinstance(prediction, str):
            raise SpecError(f"{program.spec.target}: the output {prediction}")
        loss, at = request.loss, "loss"
        if request.losses is not None:
            loss = sum_of(request.losses, (prediction,), info.labels or (info.label,))
            at = "losses"
        scores = ChainLoss(loss, prediction, info.label, (at,)).scores
        classes = scores if info.classes is None else info.classes
        self._boundary = Boundary(
            prediction, info.label, prediction, classes, loss, DEFAULT_OPTIMIZER, request.labelled
        )
        self._interfaces: dict[tuple[str, TensorSpec], float] = {}

    def named(self, at: Sequence[str]) -> list[int]:
        """Return the cuts of some names, as numbers of segments before them."""
        positions = [self._program.cut(name).position for name in at]
        if positions != sorted(set(positions)):
            raise SpecError(f"'--at {','.join(at)}' is not the order in which the network runs")
        ends = [segment.end.position if segment.end else -1 for segment in self.costs.segments]
        return [1 + ends.index(position) for position in positions]

    def best(self, slowness: Sequence[float] = (), now: Sequence[int] = ()) -> list[int]:
        """Return the best cuts, as numbers of segments before them.

        ``slowness`` is a factor on the time of each module; by default all are as fast. ``now`` are
        the present cuts, for modules that are frozen.
        """
        count, request, costs = len(self.costs.segments), self.request, self.costs
        if request.modules > count:
            raise SpecError(
                f"{self._program.spec.target} can be cut in {count - 1} places, so that it has at "
                f"most {count} modules, not {request.modules}",
                hint=self._program.obstacles,
            )
        slowness = slowness or [1.0] * request.modules
        spans = list(pairwise([0, *now, count]))
        stays = [
            frozen
            for frozen, (i, j) in zip(request.frozen, spans, strict=False)
            for _ in range(i, j)
        ]
        whole_s, whole_bytes = self.seconds(0, 0, count), costs.memory(0, count)

        def cost(number: int, i: int, j: int) -> float:
            if stays and set(stays[i:j]) != {request.frozen[number]}:
                return math.inf
            seconds = slowness[number] * self.seconds(number, i, j) / whole_s
            memory = costs.memory(i, j) / whole_bytes
            return {"time": seconds, "memory": memory, "both": max(seconds, memory)}[
                request.balance
            ]

        byte_s = math.inf if request.balance == "memory" else LINKS[request.links]
        return best_cuts(
            count,
            request.modules,
            cost,
            costs.traffic,
            lambda j: costs.traffic[j - 1] / byte_s / whole_s,
        )

    def seconds(self, number: int, i: int, j: int) -> float:
        """Time of a batch of segments ``i`` to ``j - 1``, as the module of this number."""
        return self.costs.seconds(i, j) + self._interface_seconds(number, i, j)

    def _chosen(self, number: int, i: int, j: int, lends: bool = False) -> tuple[Choice, str]:
        """Return the interface of a module that is not the last, and why it has that one."""
        attends = self.costs.attends(i, j)
        if (given := self._given(number)) is not None:
            return given, "asked"
        if not self.costs.trains(j):
            return Choice(name="none"), "frozen"
        # A tied parameter learns by true gradients alone.
        varies = any(output.varying for output in self.costs.outputs(i, j))
        reasons = {"attention": attends, "tied weights": lends, "lengths": varies}
        why = next((reason for reason, holds in reasons.items() if holds), "default")
        late = attends or lends or varies
        return default_interface(late, labelled=self.request.labelled), why

    def _given(self, number: int) -> Choice | None:
        interfaces = self.request.interfaces
        return interfaces[number if len(interfaces) > 1 else 0] if interfaces else None

    @property
    def _micro_batches(self) -> int:
        """Parts of each batch; whoever names them does so for all modules."""
        given = (choice for choice in self.request.interfaces if choice is not None)
        return max((resolve_interface(one).needs.micro_batches for one in given), default=1)

    def _interface_seconds(self, number: int, i: int, j: int) -> float:
        if j == len(self.costs.segments):
            return 0.0
        choice, _ = self._chosen(number, i, j)
        row = row_of(self.costs.outputs(i, j))
        key = choice.model_dump_json(), row
        if key not in self._interfaces:
            boundary = replace(self._boundary, activation=row)
            self._interfaces[key] = interface_seconds(choice, boundary, self.costs.samples)
        return self._interfaces[key]

    def checked(self, ends: Sequence[int], network: nn.Module) -> list[NetworkPart]:
        """Describe the modules between some cuts; refuse those that compute another result."""
        parts = self.parts(ends)
        check_parts(self._program.spec, network, self._batch, parts)
        return parts

    def parts(self, ends: Sequence[int]) -> list[NetworkPart]:
        """Describe the modules between some cuts."""
        costs = self.costs
        rows = min(part_sizes(costs.samples, self._micro_batches))
        cuts = [costs.segments[end - 1].end for end in ends]
        names = [None, *(cut.name for cut in cuts if cut is not None), None]
        sections = [
            Section.of(self._program.train, after, until) for after, until in pairwise(names)
        ]
        spans = list(pairwise([0, *ends, len(costs.segments)]))
        parameters = [costs.parameters(i, j) for i, j in spans]
        # The first part that uses a parameter has it; others borrow it.
        owner: dict[str, int] = {}
        for number, tensors in enumerate(parameters):
            for name in tensors:
                owner.setdefault(name, number)
        borrowed = [
            sorted(name for name in tensors if owner[name] != number)
            for number, tensors in enumerate(parameters)
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
            taken = sorted([*section.takes, *borrowed[number]], key=lambda node: places[node])
            owned = {
                name: tensor for name, tensor in parameters[number].items() if owner[name] == number
            }
            outputs = costs.outputs(i, j) or (self._boundary.prediction,)
            outputs += tuple(
                TensorSpec(
                    shape=(row_width(owned[name], rows),),
                    dtype=str(owned[name].dtype).split(".")[-1],
                )
                for name in lent[number]
            )
            if len(types := sorted({output.dtype for output in outputs})) > 1:
                raise SpecError(
                    f"{self._program.spec.target} cannot be cut after {names[number + 1]!r}: "
                    f"values and tied weights of types {', '.join(types)} pass"
                )
            choice, why = self._chosen(number, i, j, bool(lent[number]))
            last = j == len(costs.segments)
            parts.append(
                NetworkPart(
                    name=self._name(number),
                    after=names[number],
                    until=names[number + 1],
                    inputs=self._inputs([places[node] for node in taken], section, gives, number),
                    outputs=outputs,
                    numbers=sum(tensor.numel() for tensor in owned.values()),
                    lends=tuple(lent[number]),
                    borrows={name: taken.index(name) for name in borrowed[number]},
                    seconds=costs.seconds(i, j),
                    interface_s=self._interface_seconds(number, i, j),
                    memory=costs.memory(i, j),
                    sends=0 if last else costs.samples * bytes_of(outputs),
                    interface=None if last else choice,
                    because=why,
                    rows=rows,
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
            self._name(source) + (f".{which}" if len(gives[source]) > 1 else "")
            for source, which in places
        )
        return (*modules, *(f"data.{index}" for index in section.data))

    def _name(self, number: int) -> str:
        return self.request.names[number] if self.request.names else f"part-{number + 1}"
