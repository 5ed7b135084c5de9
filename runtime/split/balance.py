"""The best cuts of a network into modules, by the costs of what lies between two cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

Balance = Literal["time", "memory", "both"]
"""What is to be equal among the modules."""

SLACK = 1.05
"""How much slower a chain may be than the fastest one if less travels."""


def best_cuts(
    segments: int,
    modules: int,
    # (number, i, j): segments i to j - 1 as module ``number``, from 0; infinite: impossible
    cost: Callable[[int, int, int], float],
    traffic: Sequence[float],  # bytes that pass a cut after each segment
    # (end): the link at a cut after this many segments, in the unit of the cost
    link: Callable[[int], float] = lambda end: 0.0,
) -> list[int]:
    """Choose where to cut a sequence of segments; return the number of segments before each cut.

    A chain is as fast as its slowest module or link (each works while the others do). Of all cuts
    that are as good as the best one, but for ``SLACK``, those with the least traffic are taken.
    """
    if not 1 <= modules <= segments:
        raise ValueError(f"{segments} segments cannot become {modules} modules")
    known: dict[tuple[int, int, int], float] = {}

    def slowest(number: int, i: int, j: int) -> float:
        if (number, i, j) not in known:
            known[number, i, j] = max(cost(number, i, j), link(j) if j < segments else 0.0)
        return known[number, i, j]

    best = _search(segments, modules, lambda sofar, *span: max(sofar, slowest(*span)))
    spans = enumerate(pairwise([0, *best, segments]))
    limit = max(slowest(number, i, j) for number, (i, j) in spans) * SLACK
    beyond = sum(traffic) + 1.0

    def travels(sofar: float, number: int, i: int, j: int) -> float:
        over = slowest(number, i, j) > limit
        return sofar + (traffic[j - 1] if j < segments else 0.0) + (beyond if over else 0.0)

    return _search(segments, modules, travels)


def _search(
    segments: int, modules: int, total: Callable[[float, int, int, int], float]
) -> list[int]:
    """Return the cuts with the least total, which never falls with a further module."""
    # For each number of segments: the least total of so many modules, and their cuts.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for number in range(modules):
        remaining = modules - number - 1
        longer: dict[int, tuple[float, list[int]]] = {}
        for j in [segments] if not remaining else range(number + 1, segments - remaining + 1):
            options = (
                (total(sofar, number, i, j), [*cuts, j])
                for i, (sofar, cuts) in best.items()
                if i < j
            )
            longer[j] = min(options, key=lambda option: option[0])
        best = longer
    return best[segments][1][:-1]
