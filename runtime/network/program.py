"""A user's network as one program of ``torch.export``, its cuts, and what lies between two.

Tracing turns the network's ``forward`` into a list of operations, once in train mode and once in
eval mode. A *cut* lies after the last operation of one of the network's own modules, and is named
like it: ``layer2.0``. What lies between two cuts is a *piece*. Values that pass a cut become inputs
and outputs of pieces. What follows from the data alone, such as masks and position ids, does not
pass: each piece that needs it computes it again.

Shapes: B batch; a value that passes a cut has it as one dimension, which becomes the first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from dni_runtime.errors import SpecError
from dni_runtime.network.source import WRAPPED, NetworkSpec
from dni_runtime.network.trace import Trace
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.load import suggestion


@dataclass(frozen=True)
class Cut:
    """A place between two operations."""

    name: str  # of the module that it comes after; the shortest if several end here
    position: int  # number of the last operation before it
    values: tuple[TensorSpec, ...] = ()  # one sample of each value that passes
    made: tuple[int, ...] = ()  # numbers of the operations that compute these
    reason: str | None = None  # why the network cannot be cut here; None: it can


@dataclass(frozen=True)
class Program:
    spec: NetworkSpec
    train: Trace
    eval: Trace
    # Further names of tied parameters and buffers, by the one that a trace uses.
    aliases: dict[str, tuple[str, ...]]
    # Parameters and buffers that no operation uses, each with the number of the first operation
    # that uses another one of the same module; the last operation if none does.
    unused: dict[str, int]

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """All cuts by name, from the first to the last; several names may mean one."""
        cuts: dict[str, Cut] = {}
        shortest: dict[int, str] = {}
        for name, (_, end) in self.train.spans.items():
            if name in self.eval.spans and end < self.train.last:
                shortest[end] = min(shortest.get(end, name), name, key=len)
        for name, (_, end) in sorted(self.train.spans.items(), key=lambda item: item[1][1]):
            if end in shortest and name in self.eval.spans:
                cuts[name] = self._cut(shortest[end], end)
        return cuts

    def _cut(self, name: str, end: int) -> Cut:
        passing = self.train.passing(end)
        samples = [self.train.sample(node) for node in passing]
        end_of = {trace: trace.spans[name][1] for trace in self.traces}
        others = self.eval.passing(end_of[self.eval])
        also = [self.eval.sample(node) for node in others]
        layouts = [self.train.layout(node) for node in passing]
        values = [value for value in samples if isinstance(value, TensorSpec)]
        types = {value.dtype for value in values}
        stale = [stale_node for trace in self.traces if (stale_node := trace.stale(end_of[trace]))]
        if shared := self._shared(end_of):
            reason = f"operations on both sides use {shared!r}, which 'forward' changes"
        elif wrong := [sample for sample in samples if isinstance(sample, str)]:
            reason = wrong[0]
        elif also != samples or layouts != [self.eval.layout(node) for node in others]:
            reason = "other values pass in eval mode than in train mode"
        elif len(self.train.lengths_of(passing)) > 1 < len(values):
            reason = "several values pass, of different lengths that 'data.max_length' lets vary"
        elif len(types) > 1 or not all("float" in dtype for dtype in types):
            reason = f"values of types {', '.join(sorted(types))} pass"
        elif stale:
            reason = f"a value that passes ({stale[0].name}) is changed in place later"
        else:
            made = tuple(self.train.number(node) for node in passing)
            return Cut(name, end, tuple(values), made)
        return Cut(name, end, reason=reason)

    def _shared(self, ends: Mapping[Trace, int]) -> str | None:
        """Return a tensor that is changed, and is used before and after a cut."""
        sides: dict[str, set[bool]] = {}
        for trace, end in ends.items():
            for placeholder, uses in trace.uses.items():
                name = trace.names.get(placeholder, placeholder)
                sides.setdefault(name, set()).update(number > end for number in uses)
        return next((name for name in self._state if len(sides.get(name, ())) > 1), None)

    @cached_property
    def _state(self) -> list[str]:
        return sorted(
            {trace.names.get(name, name) for trace in self.traces for name in trace.state}
        )

    @property
    def obstacles(self) -> str | None:
        """Where the network cannot be cut, and why; None if there are no such places."""
        places: dict[str, dict[str, None]] = {}
        for cut in self.cuts.values():
            if cut.reason is not None:
                places.setdefault(cut.reason, {})[cut.name] = None
        told = []
        for reason, cut_names in sorted(places.items(), key=lambda item: -len(item[1]))[:4]:
            names = sorted(
                cut_names,
                key=lambda cut_name: (cut_name.count("."), list(cut_names).index(cut_name)),
            )
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told.append(f"not after {', '.join(names[:3])}{more}: {reason}")
        return "\n  ".join(told) or None

    def cut(self, name: str) -> Cut:
        if name not in self.cuts:
            raise SpecError(
                f"{self.spec.target} cannot be cut after {name!r}", hint=self._near(name)
            )
        cut = self.cuts[name]
        if cut.reason is not None:
            raise SpecError(f"{self.spec.target} cannot be cut after {name!r}: {cut.reason}")
        return cut

    def _near(self, name: str) -> str:
        possible = [other for other, cut in self.cuts.items() if cut.reason is None]
        top = [other for other in possible if "." not in other]
        return suggestion(name, possible) or f"it can be after {', '.join(top or possible[:9])} …"

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """The operations in train mode, and in eval mode."""
        return self.train, self.eval


@dataclass(frozen=True)
class Section:
    """What a piece needs and gives, in one mode."""

    takes: list[fx.Node]  # values of earlier pieces, in the order in which they are computed
    data: list[int]  # numbers of the data's inputs that it needs
    tensors: list[fx.Node]  # placeholders of its parameters, buffers and constants
    gives: list[fx.Node]  # values that later pieces take, or the network's output
    operations: list[fx.Node]  # its operations in their order, with those that follow from the data

    @classmethod
    def pair(cls, program: Program, after: str | None, until: str | None) -> tuple[Section, ...]:
        """Find it in train and in eval mode.

        What passes its cuts has the same places in eval mode as in train mode, though other pieces
        may have made it: if a piece does nothing in eval mode, its input passes instead.
        """
        train = cls.of(program.train, after, until)

        def alike(cut: str | None, nodes: Collection[fx.Node]) -> list[fx.Node]:
            passing = (
                [trace.passing(trace.spans[cut][1]) for trace in program.traces]
                if cut
                else [[], []]
            )
            return [other for node, other in zip(*passing, strict=True) if node in nodes]

        evaluated = cls.of(program.eval, after, until, alike(until, train.gives) if until else None)
        takes = alike(after, train.takes)
        if not set(takes).issuperset(evaluated.takes) or train.data != evaluated.data:
            raise SpecError(
                f"{program.spec.target}: what is between {after or 'its input'} and "
                f"{until or 'its output'} needs other values in eval mode than in train mode",
                location=("after",),
            )
        return train, replace(evaluated, takes=takes)

    @classmethod
    def of(
        cls,
        trace: Trace,
        after: str | None,
        until: str | None,
        gives: list[fx.Node] | None = None,
    ) -> Section:
        """Find it between two cuts; None is the beginning, or the end."""
        first = -1 if after is None else trace.spans[after][1]
        last = trace.last if until is None else trace.spans[until][1]
        operations = trace.operations(first, last)
        if until is None:
            (output,) = (node for node in trace.graph.nodes if node.op == "output")
            gives = list(output.all_input_nodes)
        elif gives is None:
            passing = set(trace.passing(last))
            gives = [node for node in operations if node in passing]
        inside, needed = set(operations), dict[fx.Node, None]()
        queue = [*gives, *(node for operation in operations for node in operation.all_input_nodes)]
        while queue:
            node = queue.pop()
            if node not in inside and node not in needed and not trace.is_size(node):
                needed[node] = None
                if node in trace.free:  # what follows from the data is computed again
                    changes = trace.changes.get(trace.memory(node), ())
                    queue += node.all_input_nodes
                    queue += (change for change in changes if trace.number(change) <= last)
        places = {node: number for number, node in enumerate(trace.graph.nodes)}
        ordered = sorted(needed, key=lambda node: places[node])
        recomputed = [node for node in ordered if node.op == "call_function" and node in trace.free]
        placeholders = [node for node in ordered if node.op == "placeholder"]
        data = [trace.data.index(node.name) for node in placeholders if node.name in trace.data]
        takes = [node for node in ordered if node.op != "placeholder" and node not in trace.free]
        operations = sorted([*operations, *recomputed], key=lambda node: places[node])
        by_name = {node.name: node for node in places}
        inputs = [by_name[name] for name in trace.data]
        known = {trace.length_at(node) for node in [*takes, *(inputs[at] for at in data)]}
        if known <= {None} and trace.needs_length(operations):
            data.append(next(at for at, node in enumerate(inputs) if trace.length_at(node)))
        return cls(
            takes=takes,
            data=sorted(data) if takes or data else [0],  # for the batch's size
            tensors=[node for node in placeholders if node.name not in trace.data],
            gives=gives,
            operations=operations,
        )

    @property
    def paths(self) -> set[str]:
        """Names of the network's modules that have its operations."""
        stacks = (node.meta.get("nn_module_stack", {}) for node in self.operations)
        paths = {f"{path}." for stack in stacks for path, _ in stack.values()}
        return {path.removeprefix(WRAPPED).removesuffix(".") for path in paths}
