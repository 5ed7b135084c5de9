"""When a chain's pace is known, and what its workers' reports say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dni_runtime.bench.chain import Bounds, Watch, endless, read_pace
from dni_runtime.errors import WorkerError
from dni_runtime.files import append_line
from dni_runtime.launch.prepare import prepare
from dni_runtime.rundir import RunDir

CHAIN = """\
name: small
data: {dataset: digits, batch_size: 64, flatten: true}
epochs: 2
steps: 7
defaults: {schedule: {StepLR: {step_size: 3}}}
checkpoint: {every_steps: 2}
modules:
  - name: a
    layers: [{Linear: {in_features: 64, out_features: 16}}]
    schedule: {OneCycleLR: {max_lr: 0.1, total_steps: 5}}
    schedule_every: batch
  - {name: b, layers: [{Linear: {in_features: 16, out_features: 10}}]}
"""


def report(time: float, step: int, **values: Any) -> dict[str, Any]:
    head = {"time": time, "kind": "train", "step": step, "samples": 64 * step, "lag": None}
    return {**head, "cpu_s": 0.0, "waiting_s": {}, **values}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    return made


def test_nothing_but_training(tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    head, tail = endless(prepare(tmp_path / "chain.yaml")).workers
    assert head.schedule is None
    assert tail.schedule is None
    assert head.head is not None
    assert head.head.steps is None
    assert head.head.epochs > 1000
    assert head.head.eval_every == 0
    assert (head.head.checkpoint.every_epochs, head.head.checkpoint.every_steps) == (0, None)


def test_a_pace_is_the_difference_of_two_reports(run: RunDir) -> None:
    for line in (
        report(10.0, 100, cpu_s=3.0, waiting_s={"window": 1.0}, lag=9.0),
        report(11.0, 200, cpu_s=3.5, waiting_s={"window": 1.25}, lag=4.0),
        report(12.0, 300, cpu_s=4.0, waiting_s={"window": 1.5, "gradient": 0.5}, lag=6.0),
        report(13.0, 900, cpu_s=9.0, waiting_s={"window": 9.0}, lag=99.0),
    ):
        append_line(run.metrics("a"), line)
    append_line(run.metrics("b"), report(10.1, 90, cpu_s=1.0, waiting_s={"input": 2.0}))
    append_line(run.metrics("b"), {"time": 11.0, "kind": "eval", "step": 100})
    append_line(run.metrics("b"), report(12.1, 290, cpu_s=1.5, waiting_s={"input": 3.0}))
    found = read_pace(run, ["a", "b"], 10.1, 12.1)
    a, b = found.modules
    assert (a.samples_per_s, a.batch_s, a.cpu_s, a.cores) == (6400, 0.01, 0.005, 0.5)
    assert a.waiting == {"input": 0, "window": 0.25, "gradient": 0.25}
    assert a.lag == 5, "of the reports after the first"
    assert b.waiting == pytest.approx({"input": 0.5, "window": 0, "gradient": 0})
    assert b.lag is None
    assert found.seconds == pytest.approx(2)
    assert found.batches == 200
    assert found.samples_per_s == b.samples_per_s == pytest.approx(6400)
    assert found.cores == pytest.approx(0.75)
    assert found.cpu_s == pytest.approx(0.75 / 6400)


@pytest.mark.parametrize("steps", [[], [5], [5, 5]])
def test_too_few_reports(run: RunDir, steps: list[int]) -> None:
    for moment, step in enumerate(steps):
        append_line(run.metrics("a"), report(moment, step))
    with pytest.raises(WorkerError, match="'a' has reported too rarely"):
        read_pace(run, ["a"], 0, 5)


def seen(run: RunDir, bounds: Bounds, lines: list[dict[str, Any]]) -> Watch:
    """What a watch says after each report."""
    watch = Watch(run.metrics("b"), bounds, fill=16)
    assert not watch.done()
    for line in lines:
        append_line(run.metrics("b"), line)
        if watch.done():
            break
    return watch


def test_it_waits_for_the_warmup_and_full_windows(run: RunDir) -> None:
    lines = [report(second, 6 * second) for second in range(20)]
    watch = seen(run, Bounds(warmup_s=1, seconds=4), lines)
    assert watch.begin is not None
    assert watch.end is not None
    assert watch.begin.time == 3, "16 batches after the first report, though 1 s is enough"
    assert watch.end.time == 7
    append_line(run.metrics("b"), report(30, 200))
    assert not watch.done(), "it says so once"


def test_batches_end_it_earlier(run: RunDir) -> None:
    lines = [report(second, 100 * second) for second in range(20)]
    watch = seen(run, Bounds(warmup_s=2, seconds=60, batches=150), lines)
    assert watch.begin is not None
    assert watch.end is not None
    assert (watch.begin.time, watch.end.time) == (2, 4)


def test_patience_has_an_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(run.metrics("b"), Bounds(1, 1), fill=16)
    monkeypatch.setattr("time.monotonic", lambda: 1e12)
    with pytest.raises(WorkerError, match="nothing so far"):
        watch.done()
