"""Drawn networks are trained as chains as plain torch trains them."""

from __future__ import annotations

import contextlib
from itertools import count, islice
from pathlib import Path

import pytest

from tests.generated.cases import Case, draw, simpler, source
from tests.generated.compare import run_case
from tests.generated.mutations import MUTATIONS


def drawn(ways: set[str], number: int) -> list[int]:
    return list(islice((seed for seed in count() if draw(seed).way in ways), number))


MODULES = drawn({"modules"}, 60)
SPLIT = drawn({"function", "network"}, 40)
SOME = [MODULES[:30], MODULES[30:], *(SPLIT[at : at + 10] for at in range(0, 40, 10))]


@pytest.mark.parametrize("seeds", SOME, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_chains_are_what_plain_torch_makes(seeds: list[int], tmp_path: Path) -> None:
    outcomes = [run_case(draw(seed), tmp_path / str(seed)) for seed in seeds]
    wrong = [one for one in outcomes if one.wrong]
    for one in wrong:
        print(f"seed {one.case.seed} {one.kind}: {one.text}\n{source(one.case)}\n{one.trace}")
    assert not wrong
    assert any(one.kind == "equal" for one in outcomes)


HARD = [115, 191, 256, 291, 323, 488, 499, 542, 658, 869, 921, 980, 1514, 1808]
"""Seeds that found something."""


@pytest.mark.parametrize("seed", HARD)
def test_seeds_that_found_something(seed: int, tmp_path: Path) -> None:
    outcome = run_case(draw(seed), tmp_path)
    assert outcome.kind == "equal", f"{outcome.text}\n{source(outcome.case)}\n{outcome.trace}"


FOUND = {"parts-by-samples": 14, "buffers-once": 1272, "network-trains": 415, "modes-lost": 64}
"""For each mend a seed that finds what it was made for."""


@pytest.mark.parametrize("without", MUTATIONS)
def test_it_finds_what_a_mend_was_made_for(without: str, tmp_path: Path) -> None:
    case = draw(FOUND[without])
    for mutated in (False, True):
        with MUTATIONS[without]() if mutated else contextlib.nullcontext():
            outcome = run_case(case, tmp_path / str(mutated))
        assert outcome.kind == ("equal" if not mutated else outcome.kind), outcome.text
        assert outcome.wrong == mutated, outcome.text


def test_cases_are_read_as_they_are_written() -> None:
    for seed in range(8):
        case = draw(seed)
        assert draw(seed) == case
        again = Case.of_json(case.to_json())
        assert source(again) == source(case)
        for one in simpler(case):
            compile(source(one), "drawn", "exec")
            assert one != case
