"""A run's progress, of which nobody may be left to see it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from dni_runtime.api.run import Run
from dni_runtime.files import append_line
from dni_runtime.measure.figures import MetricsReader
from dni_runtime.run.record import Record
from dnictl.progress import PlainLines, progress
from tests.unit.cli.conftest import ended


@contextlib.contextmanager
def closing(file: TextIO) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            file.close()


def test_the_test_set_gets_a_line(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    state = ended(record, "running", 0)
    with progress(Run(record)) as show:
        show(state)
        line = {"module": "top", "attempt": 1, "epoch": 2, "step": 46, "samples": 360}
        for kind, accuracy in (("eval", 0.9), ("test", 0.8)):
            line |= {"kind": kind, "time": time.time(), "loss": 0.5, "accuracy": accuracy}
            append_line(record.run.metrics("top"), line)
        state.phase = "finished"
        show(state)
        show(state)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "epoch 2/2: accuracy 90.00 %, loss 0.5",
        "test: accuracy 80.00 %, loss 0.5",
        "small-1: finished",
    ]
    state = ended(record, "running", 0, attempt=2)
    with progress(Run(record)) as show:
        show(state)
    assert capsys.readouterr().err == "small-1: running\n", "what an earlier attempt has shown"


def test_a_clock_that_is_set_back_hides_no_evaluation(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ended(record, "running", 0)
    with progress(Run(record)) as show:
        show(state)
        for epoch, at in ((1, 2e9), (2, 1e9)):
            line = {
                "kind": "eval",
                "module": "top",
                "attempt": 1,
                "epoch": epoch,
                "step": 23 * epoch,
            }
            append_line(
                record.run.metrics("top"), {**line, "samples": 360, "time": at, "loss": 0.5}
            )
            state.phase = "running" if epoch == 1 else "finished"
            show(state)
    shown = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in shown[1:-1]] == ["epoch 1/2", "epoch 2/2"]


def test_why_a_run_has_stalled(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    show, state = PlainLines(), ended(record, "running", 0)
    show(MetricsReader(record).read(state))
    state.phase, state.error = "stalled", "module 'top' is to blame"
    show(MetricsReader(record).read(state))
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["small-1: running", "small-1: stalled: module 'top' is to blame"]


def test_a_worker_that_takes_no_part_any_more(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    show, state = PlainLines(), ended(record, "running", 0)
    for phase in ("new", "inactive", "starting", "inactive", "inactive"):
        state.modules["top"].state = phase  # type: ignore[assignment]
        show(MetricsReader(record).read(state))
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["small-1: running", "top: inactive"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reader_that_leaves_does_not_end_the_run(
    record: Record, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    reader, writer = os.openpty() if terminal else os.pipe()
    monkeypatch.setenv("TERM", "dumb")  # rich looks whether its terminal is there
    state = ended(record, "running", 0)
    file = os.fdopen(writer, "w")
    with closing(file):
        monkeypatch.setattr(sys, "stderr", file)
        with progress(Run(record)) as show:
            show(state)
            shown = os.read(reader, 1 << 16)
            os.close(reader)
            state.phase = "stopping"
            show(state)
            state.phase = "stopped"
            show(state)
        monkeypatch.undo()
    assert b"small-1" in shown
