"""Files of metrics: the whole curve in one that stays small, and the newest lines in another."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.documents.metrics import parse_line
from dni_runtime.rundir import RunDir
from dni_runtime.worker import metrics_file
from dni_runtime.worker.metrics_file import MetricsFile
from tests.lines import read_lines

LIMIT = 20_000


class Metrics:
    """A module's metrics on a clock that goes on by a second with each line of training."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self.now_s = RunDir(root), 1000.0
        self.run.create()
        self.recent = self.run.recent_metrics("a")
        self.older = self.recent.with_name("a.jsonl.1")
        patch.setattr(metrics_file, "FULL_BYTES", LIMIT)
        patch.setattr(time, "monotonic", lambda: self.now_s)
        self.file = MetricsFile(self.run, "a")

    def train(self, seconds: int, attempt: int = 1) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self._write("train", attempt)

    def _write(self, kind: str, attempt: int) -> None:
        line = {"time": self.now_s, "kind": kind, "attempt": attempt, "loss": self.now_s}
        parsed = parse_line(json.dumps(line | {"module": "x" * 20}).encode())
        assert parsed is not None
        self.file.append(parsed)

    def evaluate(self, attempt: int = 1) -> None:
        self._write("eval", attempt)

    def times(self, path: Path, kind: str = "train") -> list[float]:
        return [line["time"] for line in read_lines(path) if line["kind"] == kind]


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    return Metrics(tmp_path, monkeypatch)


def test_a_short_run_has_one_file_with_all_lines(metrics: Metrics) -> None:
    metrics.train(150)
    metrics.evaluate()
    assert metrics.times(metrics.run.metrics("a")) == [1001 + n for n in range(150)]
    assert not metrics.recent.exists()


def test_a_long_run_keeps_its_curve_and_its_newest_lines(metrics: Metrics) -> None:
    evaluated = []
    for _ in range(100):
        metrics.train(90)
        metrics.evaluate()
        evaluated.append(metrics.now_s)
    whole = metrics.times(metrics.run.metrics("a"))
    assert metrics.times(metrics.run.metrics("a"), "eval") == evaluated
    assert whole == sorted(set(whole))
    full = next(n for n in range(len(whole)) if whole[n] != 1001 + n)
    assert full * 90 > LIMIT / 2
    gaps = [after - before for before, after in zip(whole[full:], whole[full + 1 :], strict=False)]
    assert set(gaps) == {60}
    newest = metrics.times(metrics.older) + metrics.times(metrics.recent)
    assert newest == [metrics.now_s - len(newest) + 1 + n for n in range(len(newest))]
    sizes = [path.stat().st_size for path in (metrics.older, metrics.recent)]
    assert LIMIT < sum(sizes) < 2 * LIMIT + 200


def test_the_last_line_of_each_start_is_kept(metrics: Metrics) -> None:
    """Its counters are summed up with those of the next start."""
    metrics.train(500)
    last = metrics.now_s
    for attempt in (2, 3):
        metrics.file = MetricsFile(metrics.run, "a")
        metrics.train(10, attempt)
    lines: list[dict[str, Any]] = list(read_lines(metrics.run.metrics("a")))
    newest = {line["attempt"]: line["time"] for line in lines}
    assert newest == {1: last, 2: last + 10, 3: last + 11}
    times = [line["time"] for line in lines]
    assert times == sorted(set(times))


def test_a_file_that_has_grown_before_goes_on(metrics: Metrics) -> None:
    """One that is full when the worker restarts."""
    metrics.train(200)
    path = metrics.run.metrics("a")
    path.write_bytes(path.read_bytes() * 5)
    size = path.stat().st_size
    metrics.file = MetricsFile(metrics.run, "a")
    metrics.train(100)
    assert path.stat().st_size - size < 400
    assert len(metrics.times(metrics.recent)) == 100
