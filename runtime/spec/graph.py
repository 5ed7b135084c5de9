"""Which module takes its input from which: the chain as a directed graph without cycles.

Modules are numbered in the order of ``chain.yaml``: each one comes after those that it takes its
inputs from, the first one is the head, and the last one is the tail. In a plain chain each module
has one input, from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dni_runtime.spec.modules import ModuleSpec


@dataclass(frozen=True)
class Graph:
    """Links between modules.

    Attributes:
        sources: For each module, the modules that it takes its inputs from, in the order of its
            inputs; none for the head.
    """

    sources: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, modules: Sequence[ModuleSpec]) -> Graph:
        """Read the modules' inputs.

        Raises:
            ValueError: An input is not the name of an earlier module, is named twice, or a module's
                output goes nowhere.
        """
        names = [module.name for module in modules]
        sources: list[tuple[int, ...]] = []
        for index, module in enumerate(modules):
            if module.inputs is None:
                sources.append((index - 1,) if index else ())
            else:
                sources.append(tuple(_earlier(one, index, names) for one in module.inputs))
                if len(set(module.inputs)) < len(module.inputs):
                    raise ValueError(f"module {module.name!r} names an input twice")
        used = {source for own in sources for source in own}
        unused = [name for index, name in enumerate(names[:-1]) if index not in used]
        if unused:
            raise ValueError(
                f"the output of module {unused[0]!r} goes nowhere: name it in the 'inputs' of a "
                "later module"
            )
        return cls(tuple(sources))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each module, the modules that take its output; none for the tail."""
        found: list[list[int]] = [[] for _ in self.sources]
        for target, own in enumerate(self.sources):
            for source in own:
                found[source].append(target)
        return tuple(map(tuple, found))

    @cached_property
    def below(self) -> tuple[int, ...]:
        """For each module, the links on the longest way from it to the tail."""
        links = [0] * len(self.sources)
        for index in range(len(links) - 2, -1, -1):
            links[index] = 1 + max(links[target] for target in self.targets[index])
        return tuple(links)

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """Number of each link, from 1: a module's first input has the module's own index."""
        first = {(own[0], target): target for target, own in enumerate(self.sources) if own}
        further = [(one, target) for target, own in enumerate(self.sources) for one in own[1:]]
        return first | {link: len(self.sources) + number for number, link in enumerate(further)}

    def beside(self, source: int, target: int) -> int:
        """Return the links on the longest way from one module to another."""
        longest = {source: 0}
        for index in range(source + 1, target + 1):
            ways = [1 + longest[one] for one in self.sources[index] if one in longest]
            if ways:
                longest[index] = max(ways)
        return longest[target]

    @property
    def is_chain(self) -> bool:
        """Whether each module but the head has one input, from the one before."""
        return all(own == (index - 1,) for index, own in enumerate(self.sources) if index)


def _earlier(wanted: str, index: int, names: Sequence[str]) -> int:
    name = names[index]
    if wanted not in names:
        raise ValueError(
            f"module {name!r} takes its input from {wanted!r}, but the modules are "
            f"{', '.join(names)}"
        )
    if wanted not in names[:index]:
        raise ValueError(
            f"module {name!r} takes its input from {wanted!r}, which does not come before it: list "
            "a module after its inputs"
        )
    return names.index(wanted)
