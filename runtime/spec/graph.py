"""Which module takes its input from which: the chain as a directed graph without cycles.

Modules are numbered in the order of ``chain.yaml``: each one comes after those that it takes its
inputs from, the first one is the head, and the last one is the tail. In a plain chain each module
has one input, from the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from dni_runtime.spec.modules import ModuleSpec

DATA = "data."
"""Beginning of the names of the data's inputs."""


@dataclass(frozen=True)
class Graph:
    """Links between modules."""

    # Of each module: those whose output it takes, in the order of its inputs.
    sources: tuple[tuple[int, ...], ...]
    # Of each module: the inputs of the data that it takes after those; None: a head that takes all.
    data: tuple[tuple[int, ...] | None, ...]
    # Which outputs of a module (source, target) another one takes, if not all.
    takes: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: Sequence[ModuleSpec]) -> Graph:
        """Read the modules' inputs; raises ``ValueError``, for pydantic, if they make no chain."""
        names = [module.name for module in modules]
        sources: list[tuple[int, ...]] = []
        data: list[tuple[int, ...] | None] = []
        takes: dict[tuple[int, int], tuple[int, ...]] = {}
        for index, module in enumerate(modules):
            if module.inputs is None:
                sources.append((index - 1,) if index else ())
                data.append(() if index else None)
                continue
            if len(set(module.inputs)) < len(module.inputs):
                raise ValueError(f"module {module.name!r} names an input twice")
            is_data = [entry.startswith(DATA) for entry in module.inputs]
            if is_data != sorted(is_data):
                raise ValueError(f"module {module.name!r} names 'data.N' before a module")
            others = module.inputs[: len(is_data) - sum(is_data)]
            if index == 0 and others:
                raise ValueError(f"the first module, {module.name!r}, takes only 'data.N'")
            above: list[int] = []
            for name, some in groupby(others, key=lambda entry: entry.partition(".")[0]):
                outputs = [int(entry.partition(".")[2] or -1) for entry in some]  # -1: all
                above.append(_earlier(name, index, names))
                if above.count(above[-1]) > 1 or outputs != sorted(outputs) or -1 in outputs[1:]:
                    raise ValueError(
                        f"module {module.name!r} names outputs of {name!r} in another order than "
                        f"'{name}.0', '{name}.1' …, one after the other"
                    )
                if outputs[0] >= 0:
                    takes[above[-1], index] = tuple(outputs)
            sources.append(tuple(above))
            data.append(
                tuple(int(entry.removeprefix(DATA)) for entry in module.inputs[len(others) :])
            )
        used = {source for some in sources for source in some}
        unused = [name for index, name in enumerate(names[:-1]) if index not in used]
        if unused:
            raise ValueError(
                f"the output of module {unused[0]!r} goes nowhere: name it in the 'inputs' of a "
                "later module"
            )
        return cls(tuple(sources), tuple(data), takes)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each module, those that take its output; none for the tail."""
        return _reversed(self.sources)

    @cached_property
    def links(self) -> tuple[tuple[int, ...], ...]:
        """For each module, those that it has a link from: the head sends inputs of the data."""
        return tuple(
            (*above, 0) if index and self.data[index] and 0 not in above else above
            for index, above in enumerate(self.sources)
        )

    @cached_property
    def below(self) -> tuple[int, ...]:
        """For each module, the links on the longest way from it to the tail."""
        longest = [0] * len(self.links)
        for index, targets in reversed(list(enumerate(_reversed(self.links)))):
            longest[index] = 1 + max((longest[target] for target in targets), default=-1)
        return tuple(longest)

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """Number of each link, from 1: a module's first input has the module's own index."""
        first = {(above[0], target): target for target, above in enumerate(self.links) if above}
        further = [
            (source, target) for target, above in enumerate(self.links) for source in above[1:]
        ]
        return first | {link: len(self.links) + number for number, link in enumerate(further)}

    def beside(self, source: int, target: int) -> int:
        """Return the links on the longest way from one module to another."""
        longest = {source: 0}
        for index in range(source + 1, target + 1):
            ways = [1 + longest[between] for between in self.links[index] if between in longest]
            if ways:
                longest[index] = max(ways)
        return longest[target]

    @property
    def is_chain(self) -> bool:
        """Whether each module but the head has one input, from the one before."""
        return all(above == (index - 1,) for index, above in enumerate(self.links) if index)


def _reversed(links: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    targets: list[list[int]] = [[] for _ in links]
    for target, sources in enumerate(links):
        for source in sources:
            targets[source].append(target)
    return tuple(map(tuple, targets))


def _earlier(source: str, index: int, names: Sequence[str]) -> int:
    name = names[index]
    if source not in names:
        raise ValueError(
            f"module {name!r} takes its input from {source!r}, but the modules are "
            f"{', '.join(names)}"
        )
    if source not in names[:index]:
        raise ValueError(
            f"module {name!r} takes its input from {source!r}, which does not come before it: list "
            "a module after its inputs"
        )
    return names.index(source)
