"""When a chain's pace is known, and what its workers' reports say of it."""

from __future__ import annotations

from typing import Any

import pytest
from peers.pace import pace_of, reports
from peers.processes import Timing

from dni_runtime.run.documents.metrics import TrainLine


def report(time: float, step: int, **values: Any) -> TrainLine:
    known = {"time": time, "kind": "train", "module": "a", "attempt": 1, "step": step}
    return TrainLine.model_validate({**known, "samples": 64 * step, **values})


def test_a_pace_is_the_difference_of_two_reports() -> None:
    lines = [
        report(10.0, 100, cpu_s=3.0, waiting_s={"window": 1.0}, lag=9.0),
        report(11.0, 200, cpu_s=3.5, waiting_s={"window": 1.25}, lag=4.0),
        report(12.0, 300, cpu_s=4.0, waiting_s={"window": 1.5, "gradient": 0.5}, lag=6.0),
        report(13.0, 900, cpu_s=9.0, waiting_s={"window": 9.0}, lag=99.0),
    ]
    found = pace_of("a", lines, 10.1, 12.1)
    assert (found.samples_per_s, found.cpu_s, found.cores) == (6400, 0.005, 0.5)
    assert found.waiting == {"window": 0.25, "gradient": 0.25}
    assert found.lag == 6


@pytest.mark.parametrize("steps", [[], [5], [5, 5]])
def test_too_few_reports(steps: list[int]) -> None:
    lines = [report(moment, step) for moment, step in enumerate(steps)]
    with pytest.raises(RuntimeError, match="a has reported too rarely"):
        pace_of("a", lines, 0, 5)


def test_it_waits_for_the_warmup_and_full_windows() -> None:
    lines = [report(second, 6 * second) for second in range(20)]
    timing = Timing(warmup_s=1, seconds=4)
    assert [reports(lines[:count], timing, fill=16) for count in (0, 3, 7)] == [None] * 3
    found = reports(lines, timing, fill=16)
    assert found is not None
    assert found[0].time == 3, "16 batches after the first report, though 1 s is enough"
    assert found[1].time == 7
