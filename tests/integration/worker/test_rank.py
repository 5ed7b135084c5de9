"""What processes of mpirun or srun wait for: a request to stop, and each other."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dni_runtime.files import write_json
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker import options
from dni_runtime.worker.background import repeating
from dni_runtime.worker.options import wait_for_others
from dni_runtime.worker.signals import StopRequest
from tests.conftest import eventually


def test_a_request_to_stop_is_heeded(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_LOOK_S", 0.01)
    write_json(run.stop_request, {"time": 1.0})  # it has stopped an earlier start
    stop = StopRequest()
    with options.heeding_stop(run, stop):
        run.stop_request.unlink()
        with pytest.raises(AssertionError, match="not within"):
            eventually("it stops", stop, 0.2)
        write_json(run.stop_request, {"time": 2.0})
        eventually("it stops", stop, 10)
    assert not stop.alone
    stop.close()


def test_who_still_saves_something_is_waited_for(run: RunDir) -> None:
    """For as long as more of it reaches the disk, and a while after."""
    began, until_s = time.monotonic(), 1.0

    def saves() -> None:
        saved = int(20 * min(time.monotonic() - began, until_s))
        Report(module="b", attempt=1, state="stopping", saving=saved).write(run.worker("b"))

    saves()
    with repeating("saves", 0.02, saves):
        wait_for_others(run, ["b"], 0.05)
    assert 1.0 <= time.monotonic() - began < 5.0


def test_the_last_one_is_waited_for(run: RunDir) -> None:
    workers = ["a", "b"]
    Report(module="a", attempt=1, state="stopped", pid=os.getpid()).write(run.worker("a"))
    Report(module="b", attempt=1, state="stopping").write(run.worker("b"))
    began = time.monotonic()
    wait_for_others(run, workers, 0.3)
    assert time.monotonic() - began >= 0.3
    stopped = Report(module="b", attempt=1, state="stopped")
    later = threading.Timer(0.3, stopped.write, [run.worker("b")])
    later.start()
    wait_for_others(run, workers, 60)
    assert 0.6 <= time.monotonic() - began < 30
    later.join()
