"""Figures of a run, as gathered from what its workers have written."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.documents.reports import Report
from dni_runtime.documents.state import RunState
from dni_runtime.files import append_line, write_json
from dni_runtime.launch.figures import MetricsReader
from dni_runtime.launch.records import Record


@pytest.fixture
def state(record: Record) -> RunState:
    state = RunState.begin("process", 1, record.modules)
    state.phase = "running"
    state.write(record.run)
    return state


def train(record: Record, module: str, when: float, step: int, **more: Any) -> None:
    append_line(
        record.run.metrics(module),
        {
            "time": when, "module": module, "attempt": 1, "kind": "train", "epoch": 1,
            "step": step, "samples": 128 * step, "batches_per_s": 4.0, "samples_per_s": 512.0,
            "loss": 0.5, "lag": None, "synthesizer_error": None, "in_flight": 0, "refused": {},
        } | more,
    )  # fmt: skip


def evaluation(
    record: Record, when: float, epoch: int, accuracy: float, attempt: int = 1, kind: str = "eval"
) -> None:
    append_line(
        record.run.metrics("top"),
        {
            "time": when, "module": "top", "attempt": attempt, "kind": kind, "id": 9,
            "epoch": epoch, "step": 8 * epoch, "loss": 1.0, "accuracy": accuracy, "samples": 100,
        },
    )  # fmt: skip


def test_before_anything_is_measured(record: Record) -> None:
    figures = MetricsReader(record).read()
    assert (figures.state, figures.epoch, figures.accuracy, figures.eta_s) == (
        "new", None, None, None,
    )  # fmt: skip
    assert [module.module for module in figures.modules] == list(record.modules)
    assert figures.modules[0].loss is None


def test_a_replica_without_a_worker_has_done_nothing(record: Record, state: RunState) -> None:
    """The first one counts what it had done before the checkpoint, and others do the rest again."""
    train(record, "middle", time.time(), 9)
    Report.model_validate({"attempt": 1, "state": "failed", "step": 9, "samples": 99}).write(
        record.run.worker("middle")
    )
    state.modules["middle"].attempt = 1
    own = MetricsReader(record).read(state).modules[1]
    assert (own.step, own.samples) == (9, 99)
    state.modules["middle"].state = "inactive"
    own = MetricsReader(record).read(state).modules[1]
    assert (own.state, own.step, own.samples, own.batches_per_s) == ("inactive", None, None, None)


def test_figures_of_a_run(record: Record, state: RunState) -> None:
    now = time.time()
    train(record, "top", now - 2, 4)
    train(record, "top", now, 12)
    train(record, "bottom", now, 14, lag=2.5, synthesizer_error=0.3, refused={"shape": 2})
    evaluation(record, now - 1, 1, 0.7)
    evaluation(record, now, 2, 0.8)
    write_json(
        record.run.worker("bottom"),
        {"attempt": 1, "state": "running", "host": "n1", "epoch": 2, "step": 15, "samples": 9,
         "error": None},
    )  # fmt: skip
    figures = MetricsReader(record).read()
    assert (figures.epoch, figures.epochs, figures.accuracy) == (2, 4, 0.8)
    assert [one.accuracy for one in figures.evaluations] == [0.7, 0.8]
    assert figures.samples_per_s == pytest.approx(128 * 4)
    assert figures.eta_s == pytest.approx((32 - 12) / 4, abs=0.5)
    bottom = figures.modules[0]
    assert (bottom.host, bottom.step, bottom.lag, bottom.synthesizer_error) == ("n1", 15, 2.5, 0.3)
    assert bottom.refused == {"shape": 2}


def test_signals_of_a_module(record: Record, state: RunState) -> None:
    signals: dict[str, Any] = {
        "synthesizer_error": 0.2, "synthesizer_cosine": 0.9, "lag": 3.5, "lag_max": 7,
        "gradients_lost": 0.01, "window": 8, "window_fill": 0.75, "in_flight": 6,
        "waiting": {"input": 0.1, "window": 0.6}, "cpu": 0.3, "memory_bytes": 1 << 20,
        "memory_peak_bytes": 2 << 20,
    }  # fmt: skip
    train(record, "bottom", time.time(), 4, head_accuracy=0.7, **signals)
    write_json(
        record.run.worker("bottom"),
        {"attempt": 1, "state": "running", "evaluation": {"loss": 0.4, "accuracy": 0.8}},
    )
    state.modules["bottom"].state = "running"
    bottom = MetricsReader(record).read(state).modules[0]
    assert {name: getattr(bottom, name) for name in signals} == signals
    assert (bottom.head_loss, bottom.head_accuracy, bottom.head_train_accuracy) == (0.4, 0.8, 0.7)


def test_the_tails_evaluation_is_the_chains(record: Record, state: RunState) -> None:
    """Modules with early heads write evaluations, too."""
    now = time.time()
    evaluation(record, now, 1, 0.9)
    append_line(
        record.run.metrics("bottom"),
        {"time": now + 1, "module": "bottom", "attempt": 1, "kind": "eval", "id": 9, "epoch": 1,
         "step": 8, "loss": 2.0, "accuracy": 0.5, "samples": 100},
    )  # fmt: skip
    write_json(record.run.worker("top"), {"attempt": 1, "evaluation": {"accuracy": 0.9}})
    figures = MetricsReader(record).read()
    assert (figures.accuracy, len(figures.evaluations)) == (0.9, 1)
    assert figures.modules[-1].head_accuracy is None


def test_one_measurement_gives_a_pace(record: Record, state: RunState) -> None:
    train(record, "top", time.time(), 4)
    assert MetricsReader(record).read().samples_per_s == 512.0


def test_only_news_is_read(record: Record, state: RunState) -> None:
    reader = MetricsReader(record)
    now = time.time()
    train(record, "top", now, 4)
    assert reader.read().modules[-1].loss == 0.5
    train(record, "top", now + 1, 8, loss=0.25)
    assert reader.read().modules[-1].loss == 0.25
    assert reader.read().modules[-1].loss == 0.25


def test_after_a_resume_what_is_said_last_counts(record: Record, state: RunState) -> None:
    now = time.time()
    for epoch in (1, 2, 3):
        evaluation(record, now, epoch, epoch / 10)
    evaluation(record, now, 2, 0.9, attempt=2)
    figures = MetricsReader(record).read()
    assert [(one.epoch, one.accuracy) for one in figures.evaluations] == [(1, 0.1), (2, 0.9)]


def test_the_test_set_has_a_figure_of_its_own(record: Record, state: RunState) -> None:
    now = time.time()
    evaluation(record, now, 3, 0.8)
    assert MetricsReader(record).read().test is None
    evaluation(record, now + 1, 3, 0.7, kind="test")
    reader = MetricsReader(record)
    figures = reader.read()
    assert (figures.accuracy, len(figures.evaluations)) == (0.8, 1)
    assert figures.test is not None
    assert (figures.test.accuracy, figures.test.epoch) == (0.7, 3)
    evaluation(record, now + 2, 2, 0.6, attempt=2)  # resumed from before
    assert reader.read().test is None
    evaluation(record, now + 3, 2, 0.5, attempt=2, kind="test")
    again = reader.read().test
    assert again is not None
    assert again.accuracy == 0.5


def test_an_earlier_attempts_pace_does_not_count(record: Record, state: RunState) -> None:
    train(record, "top", time.time() - 900, 4)
    state.attempt = 2
    assert MetricsReader(record).read(state).samples_per_s is None


def test_all_starts_of_a_module_count(record: Record, state: RunState) -> None:
    """However long ago one was."""
    now = time.time()
    train(record, "bottom", now - 400, 1, missed=3)
    for step in range(400):
        padding = "x" * 1000
        train(record, "bottom", now - 399 + step, step, attempt=2, missed=4, padding=padding)
    state.modules["bottom"].restarts = 1
    assert MetricsReader(record).read(state).modules[0].missed == 7


def _month(record: Record, evaluation_every: int) -> int:
    """Files as a worker leaves them after 30 days, 655 bytes a line; returns their bytes."""
    run, line = record.run, '{"time":%d.5,"module":"%s","attempt":1,"kind":"%s","epoch":1,"step":%d'
    line += (
        ',"samples":%d,"batches_per_s":4.0,"samples_per_s":512.0,"accuracy":0.5,"loss":0.5,"x":"'
    )
    first, last = int(time.time()) - 30 * 86400, int(time.time())

    def text(module: str, seconds: list[int]) -> str:
        lines = []
        for n, second in enumerate(seconds):
            kind = "eval" if n % evaluation_every == evaluation_every - 1 else "train"
            step = second - first
            begins = line % (second, module, kind, step, 128 * step)
            lines.append(begins + "x" * (655 - len(begins) - 3) + '"}\n')
        return "".join(lines)

    recent = run.recent_metrics("top")
    files = {
        run.metrics("top"): [*range(first, first + 12_800), *range(first + 12_800, last, 60)],
        recent.with_name("top.jsonl.1"): [*range(last - 20_000, last - 7_200)],
        recent: [*range(last - 7_200, last)],
    }
    return sum(path.write_text(text("top", seconds)) for path, seconds in files.items())


def _bytes_read() -> int:
    """So far by this process, caches included (proc(5), io)."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("evaluation_every", "all_mib", "last_mib"), [(7, 15, 4), (10_000, 75, 40)]
)
def test_a_run_of_a_month_is_read_from_its_end(
    record: Record, state: RunState, evaluation_every: int, all_mib: int, last_mib: int
) -> None:
    assert _month(record, evaluation_every) > 45 << 20
    for most, limit_mib in ((1000, all_mib), (1, last_mib)):
        reader = MetricsReader(record, evaluations=most)
        tracemalloc.start()
        before = _bytes_read()
        figures = reader.read(state)
        read_bytes, (_, peak_bytes) = _bytes_read() - before, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (figures.accuracy, figures.modules[-1].loss) == (0.5, 0.5)
        assert figures.samples_per_s == 128.0
        assert len(figures.evaluations) == (most if evaluation_every == 7 or most == 1 else 5)
        assert read_bytes < limit_mib << 20
        assert peak_bytes < 12 << 20
        before = _bytes_read()
        reader.read(state)
        assert _bytes_read() - before < 1 << 17
