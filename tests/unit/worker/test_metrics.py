"""What a worker writes about itself: lines of metrics, evaluations."""

from __future__ import annotations

import errno
import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.interfaces import LateSignal
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import StoppedError
from dni_runtime.files import read_json, write_json
from dni_runtime.run.documents.metrics import (
    EpochLine,
    EvaluationLine,
    StartLine,
    TrainLine,
    parse_line,
)
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import DataInfo, WorkerSpec
from dni_runtime.worker import metrics, report
from dni_runtime.worker.device import Copies
from dni_runtime.worker.metrics import MetricsWriter, link_figures
from dni_runtime.worker.report import MetricsFile
from tests.lines import read_lines
from tests.specs import float32, int64, linear, specs_of

CHAIN = """\
name: small
data: {batch_size: 4}
links: {window: 4}
defaults: {interface: {%s: {}}}
""" + linear(6, 5, 3, between="ReLU")
INFO = DataInfo(sample=float32(6), label=int64(), classes=3)
X, Y = torch.arange(24.0).reshape(4, 6) / 24, torch.tensor([0, 1, 2, 0])


def workers(interface: str = "mixed") -> tuple[WorkerSpec, ...]:
    return specs_of(CHAIN % interface, INFO)


class Clock:
    """Wall and CPU time that pass when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = self.cpu_s = 100.0
        patch.setattr(metrics.time, "monotonic", lambda: self.now_s)
        patch.setattr(metrics.time, "process_time", lambda: self.cpu_s)


class Worker:
    """A module, its metrics, and what the server does with both."""

    def __init__(self, root: Path, spec: WorkerSpec) -> None:
        self.run = RunDir(root)
        self.run.create()
        self.step, self.meter = ModuleStep(spec), MetricsWriter(self.run, spec, 1)
        self.id = 0

    def train(self) -> int:
        self.id += 1
        self.meter.due(self.step)
        self.step.forward(self.id, X[:, : self.step.spec.inputs[0].shape[0]])
        self.step.update(Y)
        self.meter.progress.counts.step += 1
        self.meter.progress.counts.samples += len(X)
        self.meter.count_loss(self.step.counters.loss)
        return self.id

    def late(self, id: int) -> None:
        self.step.late_gradient(id, torch.ones(4, 5))

    def line(self, **links: Any) -> dict[str, Any]:
        figures = link_figures(None, None, None, 0) | links
        self.meter.write(self.step, figures, None, Copies(self.step.device))
        return list(read_lines(self.run.metrics(self.step.spec.module)))[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def worker(tmp_path: Path, clock: Clock) -> Worker:
    return Worker(tmp_path, workers()[0])


def test_rates_and_shares_are_of_the_interval(worker: Worker, clock: Clock) -> None:
    clock.now_s += 7  # connecting is no training
    worker.meter.started()
    for _ in range(3):
        worker.train()
        worker.meter.count_window(2, 4)
    worker.meter.waiting_s["input"] += 0.5
    clock.now_s, clock.cpu_s = clock.now_s + 2, clock.cpu_s + 1.5
    first = worker.line(in_flight=1, gradients_dropped=3, refused={"shape": 1})
    assert (first["interval_s"], first["batches_per_s"], first["samples_per_s"]) == (2, 1.5, 6)
    assert (first["waiting"], first["waiting_s"]) == ({"input": 0.25}, {"input": 0.5})
    assert (first["window_fill"], first["in_flight"]) == (0.5, 1)
    assert (first["cpu"], first["gradients_dropped"], first["refused"]) == (0.75, 3, {"shape": 1})
    assert 1 << 20 < first["memory_bytes"] <= first["memory_peak_bytes"]

    worker.train()
    worker.meter.count_window(4, 4)
    worker.meter.waiting_s["window"] += 1
    clock.now_s += 4
    second = worker.line()
    assert second["waiting"] == {"input": 0, "window": 0.25}
    assert second["waiting_s"] == {"input": 0.5, "window": 1}
    assert (second["window_fill"], second["cpu"], second["samples"]) == (1, 0, 16)


def test_a_window_is_full_at_most(worker: Worker, clock: Clock) -> None:
    """Markers may exceed it."""
    worker.meter.started()
    worker.train()
    for in_flight in (8, 2, 10, 8):
        worker.meter.count_window(in_flight, 8)
    clock.now_s += 1
    assert worker.line()["window_fill"] == pytest.approx((1 + 0.25 + 1 + 1) / 4, abs=1e-4)


def test_no_line_without_training(worker: Worker, clock: Clock) -> None:
    worker.train()
    worker.line()
    clock.now_s += 3
    worker.line()
    worker.train()
    assert worker.line()["interval_s"] == 3, "lines leave no time out"
    assert len(list(read_lines(worker.run.metrics("a")))) == 2


def test_ages_and_losses_of_gradients(worker: Worker) -> None:
    store = worker.step.kept.size
    for _ in range(4):
        worker.train()
    worker.late(1)
    worker.late(4)
    line = worker.line()
    assert (line["lag"], line["lag_max"], line["gradients_lost"]) == (1.5, 3, 0)
    for _ in range(store):  # 2 and 3 are given up at last, and 2 comes after all
        worker.train()
    worker.late(2)
    worker.late(worker.id)
    worker.late(worker.id - 1)
    line = worker.line()
    assert (line["gradients_given_up"], line["gradients_unpaired"]) == (2, 1)
    assert line["gradients_lost"] == 0.5
    assert (line["lag"], line["lag_max"], line["gradients"]) == (0.5, 1, 5)
    worker.train()
    line = worker.line()
    assert (line["lag"], line["lag_max"], line["gradients_lost"]) == (None, None, None)


def test_measurements_are_means_over_few_batches(
    worker: Worker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[float] = []
    interface = worker.step.interface
    assert interface is not None
    learn = interface.learn

    def spy(*arguments: Any, measure: bool) -> LateSignal | None:
        late = learn(*arguments, measure=measure)
        if late is not None:
            errors.append(float(late.error))
        return late

    monkeypatch.setattr(interface, "learn", spy)
    for _ in range(3):
        worker.late(worker.train())
    assert len(errors) == 1, "measuring costs time"
    line = worker.line()
    assert line["synthesizer_error"] == 1, "of a synthesizer that starts at zero"
    assert line["synthesizer_cosine"] == 0
    assert line["head_accuracy"] in (0, 0.25, 0.5, 0.75, 1)
    worker.late(worker.train())
    line = worker.line()
    assert (line["synthesizer_error"], line["head_accuracy"]) == (None, None), "too early"
    for _ in range(2):
        clock.now_s += metrics.SAMPLE_S
        worker.late(worker.train())
    assert 0 < errors[2] < errors[1] < 1
    line = worker.line()
    assert line["synthesizer_error"] == pytest.approx(sum(errors[1:]) / 2, abs=1e-5)
    assert line["head_accuracy"] is not None


def test_what_does_not_apply_is_null(tmp_path: Path, clock: Clock) -> None:
    worker = Worker(tmp_path, workers()[1])
    worker.train()
    line = worker.line()
    for key in ("lag", "lag_max", "gradients_lost", "window_fill", "head_accuracy",
                "synthesizer_error", "synthesizer_cosine"):  # fmt: skip
        assert line[key] is None
    assert line["loss"] > 0


def test_a_diverged_loss_is_null(worker: Worker) -> None:
    worker.train()
    worker.meter.count_loss(torch.tensor(math.inf))
    assert worker.line()["loss"] is None


def test_what_a_start_was_made_of(tmp_path: Path) -> None:
    run, now = RunDir(tmp_path), time.time()
    run.create()
    metrics = MetricsWriter(run, workers()[0], 1, began=now - 3)
    metrics.loaded_at += 2
    metrics.started()
    (line,) = read_lines(run.metrics("a"))
    assert (line["kind"], line["began"], line["load_s"]) == ("start", now - 3, 2)
    passed_s = time.time() - now
    assert 3 <= line["import_s"] <= 3 + passed_s
    assert -2 <= line["connect_s"] <= -2 + passed_s


def test_all_fields_of_the_schema_are_written_and_no_others(worker: Worker) -> None:
    worker.meter.started()
    worker.train()
    worker.line()
    worker.meter.epoch_ended(1, 3)
    worker.meter.evaluated({"loss": 1.0}, 8, step=1)
    written = {line["kind"]: set(line) for line in read_lines(worker.run.metrics("a"))}
    evaluation = set(EvaluationLine.model_fields) - {"trained"}
    assert written == {
        "start": set(StartLine.model_fields), "train": set(TrainLine.model_fields),
        "epoch": set(EpochLine.model_fields), "eval": evaluation,
    }  # fmt: skip


def test_an_evaluation_is_told_and_shown(worker: Worker) -> None:
    evaluation = EvaluationSums.of(worker.step)
    p = torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0], [0, 9.0, 0]])
    evaluation.add(p, Y)
    evaluation.add(p[:1], Y[:1])
    result = evaluation.result()
    assert result["accuracy"] == pytest.approx(3 / 5)
    every, labels = torch.cat([p, p[:1]]), torch.cat([Y, Y[:1]])
    assert result["loss"] == pytest.approx(float(nn.functional.cross_entropy(every, labels)))
    worker.meter.evaluated(result, evaluation.samples, step=7)
    (line,) = read_lines(worker.run.metrics("a"))
    assert (line["kind"], line["samples"], line["accuracy"]) == ("eval", 5, 0.6)
    assert line["step"] == 7
    worker.meter.set_state("running")
    shown = read_json(worker.run.worker("a"))
    assert shown is not None
    assert shown["evaluation"]["accuracy"] == 0.6


def test_a_line_is_due_once_a_second(worker: Worker, clock: Clock) -> None:
    worker.train()
    assert not worker.meter.due(worker.step)
    clock.now_s += metrics.INTERVAL_S
    assert worker.meter.due(worker.step)
    worker.line()
    assert not worker.meter.due(worker.step)


def test_a_worker_that_was_given_up_leaves_without_a_word(worker: Worker) -> None:
    theirs = {"attempt": 2, "state": "connecting"}
    path = worker.run.worker(worker.meter.spec.module)
    write_json(path, theirs)  # of an earlier run by hand: no reason to leave
    worker.meter.set_state("running")
    write_json(path, theirs)
    with pytest.raises(StoppedError, match="attempt 2 of module"):
        worker.meter.set_state("running")
    worker.meter.set_state("stopped")
    assert read_json(path) == theirs


def test_training_again_is_shown_though_nothing_new_comes(worker: Worker, clock: Clock) -> None:
    worker.train()
    clock.now_s += 1
    assert worker.line()["batches_per_s"] == 1
    clock.now_s += 1
    line = worker.line(replayed=7)
    assert (line["replayed"], line["step"], line["batches_per_s"], line["loss"]) == (7, 1, 0, None)
    clock.now_s += 1
    worker.line(replayed=7)
    assert len(list(read_lines(worker.run.metrics("a")))) == 2


def test_counters_go_on_after_a_restart(worker: Worker, clock: Clock) -> None:
    """Rates do not: those of the report are of the attempt."""
    clock.cpu_s += 2
    for now_s in (1.0, 3.0):
        worker.train()
        clock.now_s = 100 + now_s
        worker.line(missed=3, refused={"shape": 1})
    worker.meter.waiting_s["input"] += 0.5
    worker.train()
    assert worker.line(missed=3, refused={"shape": 1})["missed"] == 3
    worker.meter.set_state("failed")
    shown = read_json(worker.run.worker("a"))
    assert shown is not None
    assert shown["train"]["missed"] == 3
    again = MetricsWriter(worker.run, worker.step.spec, 2, progress=worker.meter.progress)
    worker.meter = again
    worker.train()
    line = worker.line(missed=1, refused={"shape": 1, "size": 2}, shared_bytes=7)
    assert (line["attempt"], line["missed"], line["shared_bytes"]) == (2, 4, 7)
    assert line["refused"] == {"shape": 2, "size": 2}
    assert line["waiting_s"] == {"input": 0.5}
    assert line["cpu_s"] == 204


def test_the_report_has_the_rates_since_the_first_line(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(metrics.time, "time", lambda: now_s)
    shown: dict[str, Any] | None = None
    rates = []
    for now_s in (1000.0, 1002.0, 1004.0):  # noqa: B007 # the clock reads it
        worker.train()
        worker.train()
        worker.line()
        worker.meter.set_state("running")
        shown = read_json(worker.run.worker("a"))
        assert shown is not None
        rates.append((shown["batches_per_s"], shown["samples_per_s"]))
    assert rates[1:] == [(1, 4), (1, 4)]


class Metrics:
    """A file of metrics on a clock that goes on by a second with each line of training."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s = path, 1000.0
        self.file = MetricsFile(path)

    def write(self, kind: str = "train", seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now_s += 1
            line = {"time": self.now_s, "kind": kind, "loss": self.now_s, "module": "x" * 20}
            parsed = parse_line(json.dumps(line).encode())
            assert parsed is not None
            self.file.append(parsed)

    def ages_s(self, kind: str = "train") -> list[float]:
        return [self.now_s - line["time"] for line in read_lines(self.path) if line["kind"] == kind]


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(report, "FULL_BYTES", 20_000)
    monkeypatch.setattr(report, "DETAIL", 20)
    return Metrics(tmp_path / "a.jsonl")


def test_a_file_of_metrics_is_thinned_but_keeps_its_whole_curve(long: Metrics) -> None:
    long.write(seconds=150)
    assert long.ages_s() == list(range(149, -1, -1)), "it is short"
    largest = 0
    for _ in range(100):
        long.write(seconds=90)
        long.write("eval")
        largest = max(largest, long.path.stat().st_size)
    assert largest < 20_000 + 10_000
    assert len(long.ages_s("eval")) == 100
    ages_s = long.ages_s()
    assert ages_s == sorted(set(ages_s), reverse=True)
    assert ages_s[0] == 150 + 100 * 91 - 1
    for older, newer in pairwise(ages_s):
        assert older - newer <= 2 + 3 * older / 20


def test_what_is_not_thinned_may_grow(long: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations stay, and are not written anew for each line."""
    rewritten = []
    original = report.write_atomic
    monkeypatch.setattr(report, "write_atomic", lambda *a: rewritten.append(original(*a)))
    long.write("eval", seconds=1000)
    assert len(long.ages_s("eval")) == 1000
    assert 1 < len(rewritten) < 10


def test_a_full_disk_leaves_the_file_as_it_is(
    long: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with_room = report.write_atomic
    monkeypatch.setattr(report, "write_atomic", full)
    failures = 0
    for _ in range(600):
        try:
            long.write()
        except OSError:
            failures += 1
    assert 0 < failures < 10, "it does not try at each line"
    assert len(long.ages_s()) == 600
    monkeypatch.setattr(report, "write_atomic", with_room)
    long.write(seconds=400)
    assert len(long.ages_s()) < 600


def test_lines_of_a_host_whose_clock_is_behind_stay() -> None:
    text = [
        json.dumps({"kind": "train", "time": when}, separators=(",", ":")).encode()
        for when in (5000.0, 5001.0, 4000.0, 4001.0)
    ]
    assert report.thinned(text, 4001.0) == text
