"""Drawn networks are trained as chains as by plain torch; and what that finds without a mend."""

from __future__ import annotations

import contextlib
import re
from itertools import count, islice
from pathlib import Path

import pytest

from tests.generated.cases import Case, draw, simpler, source
from tests.generated.compare import Outcome, run_case
from tests.generated.mutations import MUTATIONS

OPEN: dict[str, set[str]] = {
    "cannot be called on meta tensors": {"orthogonal"},
    "Adam does not support sparse gradients": {"words-sparse", "bag-sparse"},
    "object has no attribute '0'": {"tuple", "list"},
    "the gradient of '": {"signs", "reversal"},
    "KeyError: submod_": {"watched", "decorated", "codebook", "extractor"}
    | {"spectral-norm", "spectral-norm-old"},
    "aten.allclose": {"plain"},
    "^(Runtime|Type|NotImplemented|Attribute)Error": {"function", "network"},  # of 'split' itself
    "do not compute what it computes": {"function", "network"},
    "^names: ": {"codebook"},
    "^state '.*mean'": {"replaced"},
    "^(state|evaluation|losses)": {"frozen", "still", "again"},
    "^(state|evaluation) ": {"replicas"},  # schedules of batches, parameters without a gradient
    "num_batches_tracked": {"batch-norm-mean"},
    "no 'ParametrizedLinear'": {"weight-norm-bare"},
}
"""What is still wrong, and with which elements; an entry goes when it is mended."""


def drawn(ways: set[str], number: int) -> list[int]:
    return list(islice((seed for seed in count() if draw(seed).way in ways), number))


MODULES = drawn({"modules"}, 60)
SPLIT = drawn({"function", "network"}, 40)
SOME = [MODULES[:30], MODULES[30:], *(SPLIT[at : at + 10] for at in range(0, 40, 10))]


def is_open(outcome: Outcome) -> bool:
    has = outcome.case.elements
    return any(re.search(text, outcome.text) and has & some for text, some in OPEN.items())


@pytest.mark.parametrize("seeds", SOME, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_chains_are_what_plain_torch_makes(seeds: list[int], tmp_path: Path) -> None:
    outcomes = [run_case(draw(seed), tmp_path / str(seed)) for seed in seeds]
    wrong = [one for one in outcomes if one.wrong and not is_open(one)]
    for one in wrong:
        print(f"seed {one.case.seed} {one.kind}: {one.text}\n{source(one.case)}\n{one.trace}")
    assert not wrong
    assert any(one.kind == "equal" for one in outcomes)


FOUND = {"parts-by-samples": 14, "buffers-once": 1272, "network-trains": 415}
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
