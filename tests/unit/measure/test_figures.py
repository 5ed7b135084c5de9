"""Figures of a run, as gathered from what its workers have written."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from dni_runtime.files import append_line, write_atomic
from dni_runtime.measure.figures import MetricsReader, prometheus_page
from dni_runtime.run import lines
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record


@pytest.fixture
def state(record: Record) -> RunState:
    state = RunState.begin("process", 1, record.modules)
    state.phase = "running"
    state.save(record.run)
    return state


def report(record: Record, module: str, step: int = 0, **more: Any) -> None:
    """What a running worker has told; ``train``: figures of its newest line."""
    train = {"kind": "train", "time": time.time(), "step": step, **more.pop("train", {})}
    Report.model_validate(
        {"module": module, "attempt": 1, "state": "running", "step": step, "samples": 128 * step,
         "train": train, **more}
    ).write(record.run.worker(module))  # fmt: skip


def evaluation(
    record: Record, when: float, epoch: int, accuracy: float, attempt: int = 1,
    kind: str = "eval", module: str = "top",
) -> None:  # fmt: skip
    append_line(
        record.run.metrics(module),
        {
            "time": when, "module": module, "attempt": attempt, "kind": kind, "id": 9,
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
    report(record, "middle", 9, train={"batches_per_s": 3.0})
    state.modules["middle"].attempt = 1
    own = MetricsReader(record).read(state).modules[1]
    assert (own.step, own.samples, own.batches_per_s) == (9, 1152, 3.0)
    state.modules["middle"].state = "inactive"
    own = MetricsReader(record).read(state).modules[1]
    assert (own.state, own.step, own.samples, own.batches_per_s) == ("inactive", None, None, None)


def running(state: RunState) -> RunState:
    for module in state.modules.values():
        module.state, module.attempt = "running", 1
    return state


def test_figures_of_a_run(record: Record, state: RunState) -> None:
    now = time.time()
    report(record, "top", 12, batches_per_s=4.0, samples_per_s=512.0)
    lately = {"lag": 2.5, "synthesizer_error": 0.3, "refused": {"shape": 2}}
    report(record, "bottom", 15, host="n1", train=lately)
    evaluation(record, now - 1, 1, 0.7)
    evaluation(record, now, 2, 0.8)
    figures = MetricsReader(record).read(running(state))
    assert (figures.epoch, figures.epochs, figures.accuracy) == (2, 4, 0.8)
    assert [one.accuracy for one in figures.evaluations] == [0.7, 0.8]
    assert figures.samples_per_s == 512
    assert figures.eta_s == pytest.approx((32 - 12) / 4, abs=0.5)
    bottom = figures.modules[0]
    assert (bottom.host, bottom.step, bottom.lag, bottom.synthesizer_error) == ("n1", 15, 2.5, 0.3)
    assert bottom.refused == {"shape": 2}


def test_replicas_of_the_tail_add_up(record: Record, state: RunState) -> None:
    several = record.model_copy(update={"modules": ("bottom", "top.1", "top.2")})
    for name, step in (("bottom", 9), ("top.1", 5), ("top.2", 4)):
        report(record, name, step, batches_per_s=2.0, samples_per_s=256.0)
    figures = MetricsReader(several).read(state)
    assert (figures.step, figures.samples_per_s) == (9, 512)
    assert figures.eta_s == pytest.approx((32 - 9) / 4, abs=0.5)


def test_signals_of_a_module(record: Record, state: RunState) -> None:
    signals: dict[str, Any] = {
        "synthesizer_error": 0.2, "synthesizer_cosine": 0.9, "lag": 3.5, "lag_max": 7,
        "gradients_lost": 0.01, "window_fill": 0.75, "in_flight": 6, "head_accuracy": 0.7,
        "waiting": {"input": 0.1, "window": 0.6}, "cpu": 0.3, "memory_bytes": 1 << 20,
        "memory_peak_bytes": 2 << 20,
    }  # fmt: skip
    report(record, "bottom", 4, train=signals, evaluation={"loss": 0.4, "accuracy": 0.8})
    bottom = MetricsReader(record).read(running(state)).modules[0]
    assert {name: getattr(bottom, name) for name in signals} == signals
    assert bottom.evaluation is not None
    assert (bottom.evaluation.loss, bottom.evaluation.accuracy) == (0.4, 0.8)
    state.modules["bottom"].state = "failed"
    assert MetricsReader(record).read(state).modules[0].in_flight is None


def test_the_tails_evaluation_is_the_chains(record: Record, state: RunState) -> None:
    """Modules with early heads write evaluations, too."""
    now = time.time()
    evaluation(record, now, 1, 0.9)
    evaluation(record, now + 1, 1, 0.5, module="bottom")
    figures = MetricsReader(record).read()
    assert (figures.accuracy, len(figures.evaluations)) == (0.9, 1)


def test_only_news_is_read(record: Record, state: RunState) -> None:
    reader, now = MetricsReader(record), time.time()
    evaluation(record, now, 1, 0.7)
    assert reader.read().accuracy == 0.7
    evaluation(record, now + 1, 2, 0.8)
    path = record.run.metrics("top")
    path.write_bytes(path.read_bytes().replace(b'"accuracy":0.7', b'"accuracy":0.1'))
    assert [one.accuracy for one in reader.read().evaluations] == [0.7, 0.8]


def test_a_file_that_its_worker_has_thinned_is_read_again(record: Record, state: RunState) -> None:
    reader, now = MetricsReader(record), time.time()
    path = record.run.metrics("top")
    for step in range(20):
        append_line(path, {"kind": "train", "step": step})
    evaluation(record, now, 1, 0.7)
    assert reader.read().accuracy == 0.7
    write_atomic(path, path.read_bytes().splitlines(keepends=True)[-1])
    evaluation(record, now + 1, 2, 0.8)
    for step in range(20):  # it is as long again
        append_line(path, {"kind": "train", "step": step})
    assert [one.accuracy for one in reader.read().evaluations] == [0.7, 0.8]


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
    report(record, "top", 4, samples_per_s=512.0, host="n1")
    assert MetricsReader(record).read(running(state)).samples_per_s == 512
    state.modules["top"].attempt = 2
    top = MetricsReader(record).read(state).modules[-1]
    assert (top.step, top.host) == (4, None), "it is being restarted"
    state.attempt = 2
    assert MetricsReader(record).read(state).samples_per_s is None


@pytest.mark.parametrize("most", [1, 3])
def test_of_many_evaluations_the_last_are_shown(
    record: Record, state: RunState, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 500)
    for epoch in range(1, 10):
        evaluation(record, time.time(), epoch, epoch / 10)
    found = MetricsReader(record, evaluations=most).read().evaluations
    assert [one.epoch for one in found] == list(range(10 - most, 10))


SAMPLE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} (\S+)')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parsed(page: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name and labels, of a page in Prometheus' text format 0.0.4."""
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    kinds: dict[str, str] = {}
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("#"):
            comment = re.fullmatch(r"# (HELP|TYPE) (\w+) (.+)", line)
            assert comment is not None, line
            assert comment[2] not in samples, "before its samples"
            if comment[1] == "TYPE":
                assert kinds.setdefault(comment[2], comment[3]) == comment[3]
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        assert kinds[sample[1]] == ("counter" if sample[1].endswith("_total") else "gauge")
        labels = tuple(value for _, value in LABEL.findall(sample[2]))
        assert labels not in samples.setdefault(sample[1], {}), line
        samples[sample[1]][labels] = float(sample[3])
    return samples


def test_a_page_for_prometheus(record: Record, state: RunState) -> None:
    lately = {"loss": 0.5, "missed": 3, "waiting": {"input": 0.25, "window": 0.5}, "cpu_s": 1e-7}
    report(record, "bottom", 15, train=lately)
    evaluation(record, time.time(), 2, 0.8)
    figures = MetricsReader(record).read(running(state))
    page = parsed(prometheus_page(figures.model_copy(update={"run": 'a "b"\\\nc'})))
    name = r"a \"b\"\\\nc"
    assert page["dni_loss"] == {(name, "bottom"): 0.5}
    assert page["dni_missed_total"] == {(name, "bottom"): 3}
    assert page["dni_step_total"] == {(name, "bottom"): 15}
    assert page["dni_cpu_s_total"] == {(name, "bottom"): 1e-7}
    assert page["dni_waiting"] == {
        (name, "bottom", "input"): 0.25, (name, "bottom", "window"): 0.5,
    }  # fmt: skip
    assert page["dni_running"] == {(name, module): 1 for module in record.modules}
    assert page["dni_evaluation"] == {(name, "loss"): 1.0, (name, "accuracy"): 0.8}
    assert "dni_lag" not in page
