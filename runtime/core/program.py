"""A user's network as one program of ``torch.export``, which can be cut after any of its modules.

Tracing turns the network's ``forward`` into a list of operations, once in train mode and once in
eval mode. A *cut* lies after the last operation of one of the network's own modules, and is named
like it: ``layer2.0``. What lies between two cuts is a *piece*. Values that pass a cut become inputs
and outputs of pieces. What follows from the data alone, such as masks and position ids, does not
pass: each piece that needs it computes it again.

Shapes: B batch; a value that passes a cut has it as one dimension, which becomes the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from dni_runtime.core.source import WRAPPED, NetworkSpec
from dni_runtime.errors import SpecError
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.load import suggestion

_KINDS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS = frozenset(getattr(torch.ops.aten, kind).default for kind in _KINDS)
"""Operations of a tensor, a probability, and whether to drop."""


@dataclass(frozen=True)
class Cut:
    """A place between two operations.

    Attributes:
        name: The module that it comes after; the shortest name if several end here.
        position: Number of the last operation before it.
        values: One sample of each value that passes.
        made: Numbers of the operations that compute these.
        reason: Why the network cannot be cut here; None if it can.
    """

    name: str
    position: int
    values: tuple[TensorSpec, ...] = ()
    made: tuple[int, ...] = ()
    reason: str | None = None


@dataclass(eq=False)
class Trace:
    """The operations of a network in one mode.

    Attributes:
        graph: The operations, as ``torch.export`` has found them.
        names: Where a placeholder's tensor is: the name of a parameter or buffer.
        constants: Tensors that are neither, by placeholder.
        data: Placeholders of the data's inputs, in their order.
    """

    graph: fx.Graph
    names: dict[str, str]
    constants: dict[str, Tensor]
    data: tuple[str, ...]
    _order: dict[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        for node in list(self.graph.nodes):  # checks of devices, which may differ later
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                self.graph.erase_node(node)
        self.graph.eliminate_dead_code(is_impure_node=_changes_something)
        self._order = {
            node: number
            for number, node in enumerate(
                node for node in self.graph.nodes if node.op == "call_function"
            )
        }
        used = {node.name for node in self.graph.nodes if node.users}
        self.names = {node: name for node, name in self.names.items() if node in used}

    @cached_property
    def free(self) -> frozenset[fx.Node]:
        """Nodes that follow from the data and from constants, without parameters and chance.

        Where one shares its memory with others, whatever changes that memory is one, too.
        """
        bound = {
            self.memory(node)
            for node in self.graph.nodes
            if node.op == "placeholder"
            and node.name not in self.data
            and (node.name.startswith("p_") or self.memory(node) in self.changes)
        }
        while True:
            found: set[fx.Node] = set()
            for node in self.graph.nodes:
                if self.memory(node) not in bound and (
                    node.op == "placeholder"
                    or (
                        node.op == "call_function"
                        and not _draws(node)
                        and all(one in found or self.is_size(one) for one in node.all_input_nodes)
                    )
                ):
                    found.add(node)
            others = {
                memory for memory, changes in self.changes.items() if not found.issuperset(changes)
            }
            if others <= bound:
                return frozenset(found)
            bound |= others

    @cached_property
    def changes(self) -> dict[object, list[fx.Node]]:
        """The operations that change the memory of tensors, by that memory, in their order."""
        found: dict[object, list[fx.Node]] = {}
        for node in self._order:
            for one in changed(node):
                found.setdefault(self.memory(one), []).append(node)
        return found

    @cached_property
    def state(self) -> set[str]:
        """Placeholders of tensors that operations change."""
        return {
            node.name
            for node in self.graph.nodes
            if node.op == "placeholder"
            and node not in self.free
            and self.memory(node) in self.changes
        }

    @cached_property
    def uses(self) -> dict[str, tuple[int, int]]:
        """For each placeholder, the numbers of the first and the last operation with its memory."""
        names: dict[object, list[str]] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                names.setdefault(self.memory(node), []).append(node.name)
        found: dict[str, tuple[int, int]] = {}
        for node, number in self._order.items():
            for one in node.all_input_nodes:
                for name in names.get(self.memory(one), ()):
                    found[name] = found.get(name, (number, number))[0], number
        return found

    def memory(self, node: fx.Node) -> object:
        """Return what is the same for tensors that share memory."""
        while node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
            node = node.all_input_nodes[0]  # which it returns; tracing does not show that
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is torch.strided:
            return value.untyped_storage()._cdata
        return node

    def stale(self, position: int) -> fx.Node | None:
        """Return a value that passes, and is changed and then read by operations after a position.

        Where that is one operation, as ``y += x``, or reads what the change returns, it is none.
        """
        for memory, changes in self.changes.items():
            members = [node for node in self._order if self.memory(node) == memory]
            late = [one for one in changes if self._order[one] > position]
            if not late or not members or self._order[members[0]] > position:
                continue
            if members[0] in self.free:
                continue

            def base(node: fx.Node, memory: object = memory) -> fx.Node:
                while self._order.get(node, -1) > position:
                    inputs = node.all_input_nodes
                    node = next((one for one in inputs if self.memory(one) == memory), inputs[0])
                return node

            for change in late:
                own = {base(one) for one in changed(change) if self.memory(one) == memory}
                for one in members:
                    last = max(self._order.get(user, self.last + 1) for user in [*one.users, one])
                    early = self._order[one] <= position
                    if last > self._order[change] and (early or base(one) not in own):
                        return one
        return None

    @cached_property
    def batch(self) -> frozenset[Any]:
        """Symbols of the batch's size."""
        placeholders = [node for node in self.graph.nodes if node.name in self.data]
        return frozenset(symbol(node.meta["val"].shape[0]) for node in placeholders)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """For each module that is called once, the numbers of its first and last operation."""
        calls: dict[str, set[str]] = {}
        found: dict[str, tuple[int, int]] = {}
        for node, number in self._order.items():
            for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
                path = f"{path}.".removeprefix(WRAPPED).removesuffix(".")
                if path and node not in self.free:
                    calls.setdefault(path, set()).add(key)
                    found[path] = found.get(path, (number, number))[0], number
        return {path: span for path, span in found.items() if len(calls[path]) == 1}

    def number(self, node: fx.Node) -> int:
        """Return the number of an operation."""
        return self._order[node]

    def is_size(self, node: fx.Node) -> bool:
        """Whether a node is a number that follows from the size of the batch."""
        free = getattr(symbol(node.meta.get("val")), "free_symbols", None)
        return bool(free) and self.batch.issuperset(free or ())

    def passing(self, position: int) -> list[fx.Node]:
        """Return the values that operations after a position take from those before it."""
        return [
            node
            for node, number in self._order.items()
            if number <= position
            and node not in self.free
            and not self.is_size(node)
            and any(
                user.op == "output" or (user not in self.free and self._order[user] > position)
                for user in node.users
            )
        ]

    def layout(self, node: fx.Node) -> tuple[int, int] | str:
        """Return which of a value's dimensions has the batch, and how often; or why none has."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"{node.name}, which is no tensor, passes"
        shape = tuple(value.shape)
        wrong = f"a value of shape {shape} passes, which "
        sizes = [one for one, size in enumerate(shape) if symbol(size) is not None]
        if not sizes:
            return wrong + "does not have the batch as a dimension"
        times = [symbol(shape[sizes[0]]) / one for one in self.batch]
        found = [int(one) for one in times if one.is_Integer]
        if len(sizes) > 1 or not found:
            return wrong + "depends on the batch in more than one dimension"
        return sizes[0], found[0]

    def order(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return the dimensions of a value by their strides; None if those are the usual ones.

        Random numbers are drawn in the order of the memory.
        """
        value = node.meta["val"]
        steps = [one.node.hint if isinstance(one, torch.SymInt) else one for one in value.stride()]
        found = tuple(sorted(range(value.dim()), key=lambda at: -steps[at]))
        return None if found == tuple(range(value.dim())) else found

    def sample(self, node: fx.Node) -> TensorSpec | str:
        """Return one sample of a node's value, the batch first, or why it has none."""
        layout = self.layout(node)
        if isinstance(layout, str):
            return layout
        value, (axis, times) = node.meta["val"], layout
        shape = [times] * (times > 1) + [size for at, size in enumerate(value.shape) if at != axis]
        return TensorSpec(shape=tuple(shape), dtype=str(value.dtype).split(".")[-1])

    def operations(self, after: int, until: int) -> list[fx.Node]:
        """Return the operations between two positions, without those that follow from the data."""
        return [
            node
            for node, number in self._order.items()
            if after < number <= until and node not in self.free and not self.is_size(node)
        ]

    @property
    def last(self) -> int:
        """Number of the last operation."""
        return len(self._order) - 1


@dataclass(frozen=True)
class Program:
    """A network's operations.

    Attributes:
        spec: The network.
        train: The operations in train mode.
        eval: The operations in eval mode.
        aliases: Further names of tied parameters and buffers, by the one that a trace uses.
        unused: Parameters and buffers that no operation uses, each with the number of the first
            operation that uses another one of the same module; the last one if none does.
    """

    spec: NetworkSpec
    train: Trace
    eval: Trace
    aliases: dict[str, tuple[str, ...]]
    unused: dict[str, int]

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """All cuts by name, from the first to the last; several names may mean one."""
        found: dict[str, Cut] = {}
        shortest: dict[int, str] = {}
        for name, (_, end) in self.train.spans.items():
            if name in self.eval.spans and end < self.train.last:
                shortest[end] = min(shortest.get(end, name), name, key=len)
        for name, (_, end) in sorted(self.train.spans.items(), key=lambda one: one[1][1]):
            if end in shortest and name in self.eval.spans:
                found[name] = self._cut(shortest[end], end)
        return found

    def _cut(self, name: str, end: int) -> Cut:
        passing = self.train.passing(end)
        samples = [self.train.sample(node) for node in passing]
        end_of = {one: one.spans[name][1] for one in self.traces}
        others = self.eval.passing(end_of[self.eval])
        also = [self.eval.sample(node) for node in others]
        layouts = [self.train.layout(node) for node in passing]
        values = [one for one in samples if isinstance(one, TensorSpec)]
        types = {one.dtype for one in values}
        stale = [found for one in self.traces if (found := one.stale(end_of[one]))]
        if shared := self._shared(end_of):
            reason = f"operations on both sides use {shared!r}, which 'forward' changes"
        elif wrong := [one for one in samples if isinstance(one, str)]:
            reason = wrong[0]
        elif also != samples or layouts != [self.eval.layout(node) for node in others]:
            reason = "other values pass in eval mode than in train mode"
        elif len(types) > 1 or not all("float" in one for one in types):
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
        for one, end in ends.items():
            for placeholder, uses in one.uses.items():
                name = one.names.get(placeholder, placeholder)
                sides.setdefault(name, set()).update(number > end for number in uses)
        return next((name for name in self._state if len(sides.get(name, ())) > 1), None)

    @cached_property
    def _state(self) -> list[str]:
        return sorted({one.names.get(name, name) for one in self.traces for name in one.state})

    @property
    def obstacles(self) -> str | None:
        """Where the network cannot be cut, and why; None if there are no such places."""
        places: dict[str, dict[str, None]] = {}
        for cut in self.cuts.values():
            if cut.reason is not None:
                places.setdefault(cut.reason, {})[cut.name] = None
        told = []
        for reason, found in sorted(places.items(), key=lambda one: -len(one[1]))[:4]:
            names = sorted(found, key=lambda one: (one.count("."), list(found).index(one)))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told.append(f"not after {', '.join(names[:3])}{more}: {reason}")
        return "\n  ".join(told) or None

    def cut(self, name: str) -> Cut:
        """Return the cut of a name.

        Raises:
            SpecError: There is none, or the network cannot be cut there.
        """
        if name not in self.cuts:
            raise SpecError(
                f"{self.spec.target} cannot be cut after {name!r}", hint=self._near(name)
            )
        cut = self.cuts[name]
        if cut.reason is not None:
            raise SpecError(f"{self.spec.target} cannot be cut after {name!r}: {cut.reason}")
        return cut

    def _near(self, name: str) -> str:
        possible = [one for one, cut in self.cuts.items() if cut.reason is None]
        top = [one for one in possible if "." not in one]
        return suggestion(name, possible) or f"it can be after {', '.join(top or possible[:9])} …"

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """The operations in train mode, and in eval mode."""
        return self.train, self.eval


def symbol(size: Any) -> Any:
    """Return the symbol of a size that is known only at run time; None for other sizes."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return None if expression is None or expression.is_number else expression


def changed(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an operation changes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    given = dict(zip((one.name for one in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    names = [
        one.name
        for one in schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
    ]
    if given.get("training", given.get("use_input_stats")) is True:
        names += ["running_mean", "running_var"]  # of which the schema does not tell
    found: list[fx.Node] = []
    fx.node.map_arg([given.get(name) for name in names], found.append)
    return found


def _changes_something(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or bool(changed(node))


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
