"""A user's network as one program of ``torch.export``, which can be cut after any of its modules.

Tracing turns the network's ``forward`` into a list of operations, once in train mode and once in
eval mode. A *cut* lies after the last operation of one of the network's own modules, and is named
like it: ``layer2.0``. What lies between two cuts is a *piece*. Values that pass a cut become inputs
and outputs of pieces. What follows from the data alone, such as masks and position ids, does not
pass: each piece that needs it computes it again.

Shapes: B batch; all values that pass a cut have it as first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from dni_runtime.core.source import WRAPPED, NetworkSpec
from dni_runtime.errors import SpecError
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.load import suggestion


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
        constants: Tensors that ``forward`` itself makes, by placeholder.
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

    @cached_property
    def free(self) -> frozenset[fx.Node]:
        """Nodes that follow from the data and from constants, without parameters and chance."""
        changed = {node.args[0] for node in self._order if in_place(node)}
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                name = self.names.get(node.name)
                if name is None or (node.name.startswith("b_") and node not in changed):
                    found.add(node)
            elif (
                node.op == "call_function"
                and not in_place(node)
                and not _draws(node)
                and not _counts(node)
                and all(one in found for one in node.all_input_nodes)
            ):
                found.add(node)
        return frozenset(found)

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

    def is_batch(self, node: fx.Node) -> bool:
        """Whether a node is the size of the batch."""
        return symbol(node.meta.get("val")) in self.batch

    def passing(self, position: int) -> list[fx.Node]:
        """Return the values that operations after a position take from those before it."""
        return [
            node
            for node, number in self._order.items()
            if number <= position
            and node not in self.free
            and not self.is_batch(node)
            and any(
                user.op == "output" or (user not in self.free and self._order[user] > position)
                for user in node.users
            )
        ]

    def sample(self, node: fx.Node) -> TensorSpec | str:
        """Return one sample of a node's value, or why it is none."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"{node.name} is no tensor"
        first, *others = value.shape or (0,)
        if symbol(first) not in self.batch:
            return f"{node.name} {tuple(value.shape)} does not have the batch as first dimension"
        if any(isinstance(one, torch.SymInt) for one in others):
            return f"{node.name} {tuple(value.shape)} has a shape that depends on the batch"
        return TensorSpec(shape=tuple(map(int, others)), dtype=str(value.dtype).split(".")[-1])

    def operations(self, after: int, until: int) -> list[fx.Node]:
        """Return the operations between two positions, without those that follow from the data."""
        return [
            node
            for node, number in self._order.items()
            if after < number <= until and node not in self.free and not self.is_batch(node)
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
        unused: Parameters and buffers that no operation uses.
    """

    spec: NetworkSpec
    train: Trace
    eval: Trace
    aliases: dict[str, tuple[str, ...]]
    unused: tuple[str, ...]

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
        also = [self.eval.sample(node) for node in self.eval.passing(self.eval.spans[name][1])]
        values = [one for one in samples if isinstance(one, TensorSpec)]
        types = {one.dtype for one in values}
        if wrong := [one for one in samples if isinstance(one, str)]:
            reason = wrong[0]
        elif also != samples:
            reason = "other values pass in eval mode than in train mode"
        elif len(types) > 1 or not all("float" in one for one in types):
            reason = f"values of types {', '.join(sorted(types))} pass"
        else:
            made = tuple(self.train.number(node) for node in passing)
            return Cut(name, end, tuple(values), made)
        return Cut(name, end, reason=reason)

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


def in_place(node: fx.Node) -> bool:
    """Whether an operation changes its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def alias_of(node: fx.Node) -> bool:
    """Whether an operation returns a view of its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments:
        return False
    return schema.arguments[0].alias_info is not None


def _changes_something(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or in_place(node)


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _counts(node: fx.Node) -> bool:
    """Whether an operation keeps statistics of what it gets, as BatchNorm does."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(one.name == "running_mean" for one in schema.arguments)
