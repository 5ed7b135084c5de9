"""Figures over repetitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.bench.chain import ChainPace, ModulePace
from dni_runtime.bench.comparison import Comparison, draw, summarize
from dni_runtime.bench.reference import ReferencePace
from dni_runtime.bench.spread import Spread, ratios


def chain(rate: float, lag: float | None) -> ChainPace:
    waiting = {"input": 0.1, "window": 0.3, "gradient": 0.0}
    module = ModulePace("only", rate, 64 / rate, 0.002, 0.6, waiting, lag)
    return ChainPace(2.0, 50, rate, 0.6, 0.6 / rate, (module,))


def reference(rate: float) -> ReferencePace:
    return ReferencePace(2.0, 50, rate, 0.9, 0.9 / rate)


@pytest.fixture
def found() -> Comparison:
    chains = [chain(100, None), chain(300, 2.0), chain(200, 4.0)]
    return summarize(chains, [reference(100), reference(100), reference(400)], 2)


def test_spread() -> None:
    assert Spread.of([3, 1, 8, 4]) == Spread(3.5, 1, 8)


def test_ratios_stay_within_a_repetition() -> None:
    assert ratios([1, 6], [2, 3]) == [0.5, 2]
    with pytest.raises(ValueError, match="zip"):
        ratios([1], [1, 2])


def test_summary(found: Comparison) -> None:
    assert found.samples_per_s == Spread(200, 100, 300)
    assert found.reference_samples_per_s == Spread(100, 100, 400)
    assert found.ratio == Spread(1, 0.5, 3), "not the quotient of the medians"
    assert found.repetitions == 3
    (row,) = found.modules
    assert row.computing == pytest.approx(0.6)
    assert row.lag == 3
    assert row.cpu_ms == Spread(2, 2, 2)


def test_plot(found: Comparison, tmp_path: Path) -> None:
    draw(found, "small", tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
