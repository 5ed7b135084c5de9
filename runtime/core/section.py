"""What lies between two cuts of a network: the operations, what they take, and what they give."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import fx

from dni_runtime.core.program import Program
from dni_runtime.core.source import WRAPPED
from dni_runtime.core.trace import Trace
from dni_runtime.errors import SpecError


@dataclass(frozen=True)
class Section:
    """What a piece needs and gives, in one mode."""

    takes: list[fx.Node]  # values of earlier pieces, in the order in which they are computed
    data: list[int]  # numbers of the data's inputs that it needs
    tensors: list[fx.Node]  # placeholders of its parameters, buffers and constants
    gives: list[fx.Node]  # values that later pieces take, or the network's output
    own: list[fx.Node]  # its operations in their order, with those that follow from the data

    @classmethod
    def pair(cls, program: Program, after: str | None, until: str | None) -> tuple[Section, ...]:
        """Find it in train and in eval mode.

        What passes its cuts has the same places in eval mode as in train mode, though other pieces
        may have made it: if a piece does nothing in eval mode, its input passes instead.
        """
        train = cls.of(program.train, after, until)

        def alike(cut: str | None, nodes: Collection[fx.Node]) -> list[fx.Node]:
            passing = (
                [one.passing(one.spans[cut][1]) for one in program.traces] if cut else [[], []]
            )
            return [other for own, other in zip(*passing, strict=True) if own in nodes]

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
        one: Trace,
        after: str | None,
        until: str | None,
        gives: list[fx.Node] | None = None,
    ) -> Section:
        """Find it between two cuts; None is the beginning, or the end."""
        first = -1 if after is None else one.spans[after][1]
        last = one.last if until is None else one.spans[until][1]
        own = one.operations(first, last)
        if until is None:
            (output,) = (node for node in one.graph.nodes if node.op == "output")
            gives = list(output.all_input_nodes)
        elif gives is None:
            passing = set(one.passing(last))
            gives = [node for node in own if node in passing]
        inside, needed = set(own), dict[fx.Node, None]()
        left = [*gives, *(node for operation in own for node in operation.all_input_nodes)]
        while left:
            node = left.pop()
            if node not in inside and node not in needed and not one.is_size(node):
                needed[node] = None
                if node in one.free:  # what follows from the data is computed again
                    changes = one.changes.get(one.memory(node), ())
                    left += node.all_input_nodes
                    left += (change for change in changes if one.number(change) <= last)
        places = {node: number for number, node in enumerate(one.graph.nodes)}
        ordered = sorted(needed, key=lambda node: places[node])
        again = [node for node in ordered if node.op == "call_function" and node in one.free]
        placeholders = [node for node in ordered if node.op == "placeholder"]
        data = [one.data.index(node.name) for node in placeholders if node.name in one.data]
        takes = [node for node in ordered if node.op != "placeholder" and node not in one.free]
        return cls(
            takes=takes,
            data=sorted(data) if takes or data else [0],  # for the batch's size
            tensors=[node for node in placeholders if node.name not in one.data],
            gives=gives,
            own=sorted([*own, *again], key=lambda node: places[node]),
        )

    @property
    def paths(self) -> set[str]:
        """Names of the network's modules that have its operations."""
        stacks = (node.meta.get("nn_module_stack", {}) for node in self.own)
        paths = {f"{path}." for stack in stacks for path, _ in stack.values()}
        return {path.removeprefix(WRAPPED).removesuffix(".") for path in paths}
