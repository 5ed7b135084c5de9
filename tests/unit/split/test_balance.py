"""The chosen cuts are as good as the best of all, and send little."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from dni_runtime.split.balance import SLACK, best_cuts


def spans(cuts: list[int], segments: int) -> list[tuple[int, int]]:
    return list(pairwise([0, *cuts, segments]))


@pytest.mark.parametrize("seed", range(40))
def test_as_good_as_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    segments, modules = draw.randint(4, 10), draw.randint(2, 4)
    seconds = [draw.expovariate(1) for _ in range(segments)]
    ends = [draw.random() * draw.choice([0, 1]) for _ in range(segments)]  # of interfaces
    links = [draw.random() * draw.choice([0, 2]) for _ in range(segments)]
    traffic = [draw.randint(1, 100) for _ in range(segments)]
    slowness = [draw.choice([1.0, 1.0, 3.0]) for _ in range(modules)]

    def cost(number: int, i: int, j: int) -> float:
        return slowness[number] * (sum(seconds[i:j]) + (ends[j - 1] if j < segments else 0.0))

    def slowest(cuts: list[int]) -> float:
        costs = [cost(number, *span) for number, span in enumerate(spans(cuts, segments))]
        return max(*costs, *(links[j - 1] for j in cuts))

    every = [list(one) for one in combinations(range(1, segments), modules - 1)]
    best = min(map(slowest, every))
    chosen = best_cuts(segments, modules, cost, traffic, lambda j: links[j - 1])
    assert slowest(chosen) <= best * SLACK * (1 + 1e-9)
    good = [one for one in every if slowest(one) <= best * SLACK]
    least = min(sum(traffic[j - 1] for j in one) for one in good)
    assert sum(traffic[j - 1] for j in chosen) == least


def test_one_module_has_no_cut() -> None:
    assert best_cuts(3, 1, lambda number, i, j: float(j - i), [1, 1, 1]) == []


def test_more_modules_than_segments() -> None:
    with pytest.raises(ValueError, match="2 segments cannot become 3 modules"):
        best_cuts(2, 3, lambda number, i, j: 1.0, [1, 1])
