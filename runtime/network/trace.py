"""A network's operations in one mode: which change memory, follow from the data, or pass a cut.

A value that passes a cut has the batch as one dimension, which becomes the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from dni_runtime.network.source import WRAPPED
from dni_runtime.spec import TensorSpec

_KINDS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS = frozenset(getattr(torch.ops.aten, kind).default for kind in _KINDS)
"""Operations of a tensor, a probability, and whether to drop."""


@dataclass(eq=False)
class Trace:
    """The operations of a network in one mode."""

    graph: fx.Graph  # as ``torch.export`` has found it
    names: dict[str, str]  # of a parameter or buffer, by its placeholder
    constants: dict[str, Tensor]  # tensors that are neither, by placeholder
    data: tuple[str, ...]  # placeholders of the data's inputs, in their order
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
            nodes: set[fx.Node] = set()
            for node in self.graph.nodes:
                if self.memory(node) not in bound and (
                    node.op == "placeholder"
                    or (
                        node.op == "call_function"
                        and not _draws(node)
                        and all(
                            operand in nodes or self.is_size(operand)
                            for operand in node.all_input_nodes
                        )
                    )
                ):
                    nodes.add(node)
            others = {
                memory for memory, changes in self.changes.items() if not nodes.issuperset(changes)
            }
            if others <= bound:
                return frozenset(nodes)
            bound |= others

    def of_names(self, names: Collection[str]) -> set[fx.Node]:
        """Return the placeholders of these parameters."""
        return {node for node in self.graph.nodes if self.names.get(node.name) in names}

    def learns(self, values: Collection[fx.Node]) -> bool:
        """Whether a gradient of the output reaches one of these: not by ``detach``, ``no_grad``."""
        reached = set(values)
        for node in self.graph.nodes:
            sources = reached.intersection(node.all_input_nodes)
            if sources and self._passes_gradients(node, sources):
                if node.op == "output" or changed(node):  # others may read what it changes
                    return True
                reached.add(node)
        return False

    def _passes_gradients(self, node: fx.Node, sources: Collection[fx.Node]) -> bool:
        value = node.meta.get("val")
        if node.target is torch.ops.aten.detach.default or (
            isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        ):
            return False
        modes = [mode for mode in node.meta.get("modes", ()) if mode.func is torch.set_grad_enabled]
        # Under no_grad, what does nothing, as flatten may, returns its tensor with its gradient.
        return not modes or modes[-1].args[0] or self.memory(node) in map(self.memory, sources)

    @cached_property
    def changes(self) -> dict[object, list[fx.Node]]:
        """The operations that change the memory of tensors, by that memory, in their order."""
        by_memory: dict[object, list[fx.Node]] = {}
        for node in self._order:
            for tensor in changed(node):
                by_memory.setdefault(self.memory(tensor), []).append(node)
        return by_memory

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
        ends: dict[str, tuple[int, int]] = {}
        for node, number in self._order.items():
            for operand in node.all_input_nodes:
                for name in names.get(self.memory(operand), ()):
                    ends[name] = ends.get(name, (number, number))[0], number
        return ends

    def memory(self, node: fx.Node) -> object:
        """Return what is the same for tensors that share memory."""
        memory = _memory(node)
        return self._returned.get(memory, memory)

    @cached_property
    def _returned(self) -> dict[object, object]:
        """What a dropout that drops nothing returns is its operand; tracing does not show that."""
        memories = dict[object, object]()
        for node in self.graph.nodes:
            if node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
                operand = _memory(node.all_input_nodes[0])
                memories[_memory(node)] = memories.get(operand, operand)
        return memories

    def stale(self, position: int) -> fx.Node | None:
        """Return a value that passes, and is changed and then read by operations after a position.

        Where that is one operation, as ``y += x``, or reads what the change returns, it is none.
        """
        for memory, changes in self.changes.items():
            members = [node for node in self._order if self.memory(node) == memory]
            late = [change for change in changes if self._order[change] > position]
            if not late or not members or self._order[members[0]] > position:
                continue
            if members[0] in self.free:
                continue

            def base(node: fx.Node, memory: object = memory) -> fx.Node:
                while self._order.get(node, -1) > position:
                    inputs = node.all_input_nodes
                    node = next(
                        (operand for operand in inputs if self.memory(operand) == memory), inputs[0]
                    )
                return node

            for change in late:
                bases = {
                    base(tensor) for tensor in changed(change) if self.memory(tensor) == memory
                }
                for member in members:
                    last = max(
                        self._order.get(user, self.last + 1) for user in [*member.users, member]
                    )
                    early = self._order[member] <= position
                    if last > self._order[change] and (early or base(member) not in bases):
                        return member
        return None

    @cached_property
    def batch(self) -> frozenset[Any]:
        """Symbols of the batch's size."""
        placeholders = [node for node in self.graph.nodes if node.name in self.data]
        return frozenset(symbol(node.meta["val"].shape[0]) for node in placeholders)

    def doubts(self, symbols: Collection[Any], values: Sequence[int]) -> set[int]:
        """Return values of these sizes for which something that was assumed does not hold.

        Of each condition, which may be one in ``forward`` or in an operation, the first and the
        last. The other sizes are those of the traced batch.
        """
        shapes = [node.meta["val"].shape for node in self.graph.nodes if node.name in self.data]
        sizes = [size for shape in shapes for size in shape if symbol(size) is not None]
        fixed = {symbol(size): size.node.hint for size in sizes if symbol(size) not in symbols}
        found = set[int]()
        for guard in {guard.expr for guard in sizes[0].node.shape_env.guards}:
            condition = guard.subs(fixed)
            if condition.free_symbols and condition.free_symbols <= set(symbols):
                fails = [n for n in values if not condition.subs(dict.fromkeys(symbols, n))]
                found.update(fails[:1], fails[-1:])
        return found

    @cached_property
    def lengths(self) -> frozenset[Any]:
        """Symbols of the samples' length, if that is another one in each batch."""
        placeholders = [node for node in self.graph.nodes if node.name in self.data]
        sizes = (symbol(size) for node in placeholders for size in node.meta["val"].shape[1:])
        return frozenset(size for size in sizes if size is not None)

    def length_at(self, node: fx.Node) -> int | None:
        """Return which dimension of a value is as long as the samples."""
        shape = getattr(node.meta.get("val"), "shape", ())
        return next((at for at, size in enumerate(shape) if symbol(size) in self.lengths), None)

    def lengths_of(self, nodes: Iterable[fx.Node]) -> set[tuple[Any, ...]]:
        """Return what follows from the samples' length of the sizes of values that have such."""
        shapes = (getattr(node.meta.get("val"), "shape", ()) for node in nodes)
        sizes = (tuple(map(symbol, shape)) for shape in shapes)
        found = {
            tuple(one for one in shape if one is not None and one.free_symbols & self.lengths)
            for shape in sizes
        }
        return found - {()}

    def needs_length(self, operations: Iterable[fx.Node]) -> bool:
        """Whether an operation takes a number that follows from the samples' length."""
        sizes = (symbol(one.meta.get("val")) for op in operations for one in op.all_input_nodes)
        return any(self.lengths & getattr(size, "free_symbols", set()) for size in sizes)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """For each module that is called once, the numbers of its first and last operation."""
        calls: dict[str, set[str]] = {}
        spans: dict[str, tuple[int, int]] = {}
        for node, number in self._order.items():
            for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
                path = f"{path}.".removeprefix(WRAPPED).removesuffix(".")
                if path and node not in self.free:
                    calls.setdefault(path, set()).add(key)
                    spans[path] = spans.get(path, (number, number))[0], number
        return {path: span for path, span in spans.items() if len(calls[path]) == 1}

    def number(self, node: fx.Node) -> int:
        return self._order[node]

    def is_size(self, node: fx.Node) -> bool:
        """Whether a node is a number that follows from the batch's size and length."""
        free = getattr(symbol(node.meta.get("val")), "free_symbols", None)
        return bool(free) and (self.batch | self.lengths).issuperset(free or ())

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
        of_batch = [self.batch & getattr(symbol(size), "free_symbols", set()) for size in shape]
        sizes = [axis for axis, free in enumerate(of_batch) if free]
        if not sizes:
            return wrong + "does not have the batch as a dimension"
        times = [symbol(shape[sizes[0]]) / size for size in self.batch]
        factors = [int(factor) for factor in times if factor.is_Integer]
        if len(sizes) > 1 or not factors:
            return wrong + "depends on the batch in more than one dimension"
        return sizes[0], factors[0]

    def order(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return the dimensions of a value by their strides; None if those are the usual ones.

        Random numbers are drawn in the order of the memory.
        """
        value = node.meta["val"]
        steps = [
            step.node.hint if isinstance(step, torch.SymInt) else step for step in value.stride()
        ]
        dims = tuple(sorted(range(value.dim()), key=lambda at: -steps[at]))
        return None if dims == tuple(range(value.dim())) else dims

    def sample(self, node: fx.Node) -> TensorSpec | str:
        """Return one sample of a node's value, the batch first, or why it has none."""
        layout = self.layout(node)
        if isinstance(layout, str):
            return layout
        value, (axis, times) = node.meta["val"], layout
        shape = [times] * (times > 1) + [size for at, size in enumerate(value.shape) if at != axis]
        return TensorSpec(
            shape=tuple(
                size.node.hint if isinstance(size, torch.SymInt) else size for size in shape
            ),
            dtype=str(value.dtype).split(".")[-1],
            varying=tuple(at for at, size in enumerate(shape) if symbol(size) is not None),
        )

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


def _memory(node: fx.Node) -> object:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return value.untyped_storage()._cdata
    return node


def symbol(size: Any) -> Any:
    """Return the symbol of a size that is known only at run time; None for other sizes."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return None if expression is None or expression.is_number else expression


def changed(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an operation changes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    arguments = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    arguments |= node.kwargs
    names = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if arguments.get("training", arguments.get("use_input_stats")) is True:
        names += ["running_mean", "running_var"]  # of which the schema does not tell
    tensors: list[fx.Node] = []
    fx.node.map_arg([arguments.get(name) for name in names], tensors.append)
    return tensors


def _changes_something(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or bool(changed(node))


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
