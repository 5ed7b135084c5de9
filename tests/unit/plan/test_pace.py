"""How long batches take, and how many replicas balance that."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.files import append_line
from dni_runtime.plan.pace import balancing_replicas, batch_seconds
from dni_runtime.run.rundir import RunDir


@pytest.mark.parametrize(
    ("b", "d", "wanted"),
    [
        pytest.param(0.030, 0.001, {"b": 3, "d": 1}, id="three times as slow as a fixed module"),
        pytest.param(0.031, 0.001, {"b": 3, "d": 1}, id="a difference that may be measured only"),
        pytest.param(0.090, 0.050, {"b": 4, "d": 3}, id="the most are not enough"),
        pytest.param(0.004, 0.009, {"b": 1, "d": 1}, id="faster than the others"),
    ],
)  # fmt: skip
def test_as_many_as_balance_the_chain(b: float, d: float, wanted: dict[str, int]) -> None:
    seconds = {"a": 0.010, "b": b, "c": 0.008, "d": d}
    replicas = {"a": 1, "b": 4, "c": 1, "d": 4}
    assert balancing_replicas(seconds, replicas, {"b": 4, "d": 4}) == wanted


def test_the_time_of_a_batch_has_no_waiting_in_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    assert batch_seconds(run, "a") is None
    lines = [
        {"kind": "start", "began": 1.0},
        {"kind": "train", "batches_per_s": 10.0, "waiting": {"input": 0.25, "window": 0.25}},
        {"kind": "train", "batches_per_s": 0.0, "waiting": {}},
    ]
    for line in lines:
        append_line(run.metrics("a"), line)
    assert batch_seconds(run, "a") == pytest.approx(0.05)
