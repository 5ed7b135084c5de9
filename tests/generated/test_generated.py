"""Drawn networks are trained as chains as plain torch trains them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path

import pytest

from tests.generated.cases import Case, draw, simpler, source
from tests.generated.compare import run_case


def drawn(ways: set[str], number: int) -> list[int]:
    return list(islice((seed for seed in count() if draw(seed).way in ways), number))


SOME = [drawn({"modules"}, 6), drawn({"function", "network"}, 4)]


@pytest.mark.parametrize("seeds", SOME, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_chains_are_what_plain_torch_makes(seeds: list[int], tmp_path: Path) -> None:
    check(seeds, tmp_path)


def check(seeds: Iterable[int], tmp_path: Path) -> None:
    outcomes = [run_case(draw(seed), tmp_path / str(seed)) for seed in seeds]
    wrong = [one for one in outcomes if one.wrong]
    for one in wrong:
        print(f"seed {one.case.seed} {one.kind}: {one.text}\n{source(one.case)}\n{one.trace}")
    assert not wrong
    assert any(one.kind == "equal" for one in outcomes)


def test_where_rounding_decides_nothing_is_compared(tmp_path: Path) -> None:
    """Plain torch with weights changed by 1e-15 differs by more than 1: inputs of a ReLU are 0."""
    outcome = run_case(draw(153940), tmp_path)
    assert outcome.kind == "unstable", outcome.text


HARD = [
    115,
    191,
    256,
    291,
    323,
    488,
    499,
    542,
    658,
    869,
    921,
    980,
    1514,
    1576,
    1808,
    42014,
    43401,
    50112,
    63195,
    64934,
    80859,
    81053,
    81434,
    100075,
]
"""Seeds that found something."""


@pytest.mark.parametrize("seed", HARD)
def test_seeds_that_found_something(seed: int, tmp_path: Path) -> None:
    outcome = run_case(draw(seed), tmp_path)
    assert outcome.kind == "equal", f"{outcome.text}\n{source(outcome.case)}\n{outcome.trace}"


@pytest.mark.parametrize("seed", [63145, 64519, 84490])
def test_what_a_module_cannot_do_is_refused_for_its_reason(seed: int, tmp_path: Path) -> None:
    """Weights of two types that are tied; what is changed in place after a checkpoint."""
    assert run_case(draw(seed), tmp_path).reason is not None


def test_cases_are_read_as_they_are_written() -> None:
    for seed in range(8):
        case = draw(seed)
        assert draw(seed) == case
        again = Case.of_json(case.to_json())
        assert source(again) == source(case)
        for one in simpler(case):
            compile(source(one), "drawn", "exec")
            assert one != case
