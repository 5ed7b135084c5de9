"""Networks that nobody has seen are trained as plain torch trains them; mends are missed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from tests.generated.cases import draw
from tests.generated.compare import run_case
from tests.generated.mutations import MUTATIONS
from tests.generated.test_generated import check

FIRST = int(time.time() // 86400) * 1000
"""Tonight's seeds."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(FIRST, FIRST + 400, 50))
def test_chains_are_what_plain_torch_makes_tonight(first: int, tmp_path: Path) -> None:
    check(range(first, first + 50), tmp_path)


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
