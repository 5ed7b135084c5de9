"""Workers that go on without a supervisor are ended before their run goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from dni_runtime.documents.state import RunPhase, RunState, process_birth
from dni_runtime.errors import UsageError, WorkerError
from dni_runtime.launch.lease import Lease, LeaseError
from dni_runtime.launch.local import Scheduler
from dni_runtime.launch.plan import LaunchPlan
from dni_runtime.launch.records import Record
from dni_runtime.launch.schedulers import SCHEDULERS
from dni_runtime.launch.start import Launch, end_leftovers, take
from dni_runtime.rundir import RunDir


class Counting(Scheduler):
    """Counts how often it has cleaned up."""

    def __init__(self) -> None:
        self.cleaned = 0

    def clean_up(self, plan: LaunchPlan) -> None:
        self.cleaned += 1


@pytest.mark.parametrize(("error", "cleaned"), [(WorkerError("x"), 1), (LeaseError("x"), 0)])
def test_hosts_are_cleaned_up_unless_another_supervisor_has_the_run(
    plan: LaunchPlan,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    error: WorkerError,
    cleaned: int,
) -> None:
    def fail(launch: Launch) -> NoReturn:
        raise error

    scheduler = Counting()
    monkeypatch.setitem(SCHEDULERS, "local", scheduler)  # type: ignore[arg-type]
    monkeypatch.setattr(Launch, "supervisor", fail)
    with pytest.raises(type(error)):
        Launch(record.run, plan, Lease.take(record.run)).supervise()
    assert scheduler.cleaned == cleaned


@pytest.mark.parametrize("phase", ["stopped", "running"])
def test_a_run_that_ends_is_waited_for(record: Record, phase: RunPhase) -> None:
    lease = Lease.take(record.run)
    replace(RunState.begin("process", 1, ["stem"]), phase=phase).write(record.run)
    releasing = threading.Timer(0.3, lease.release)
    releasing.start()
    if phase == "stopped":  # reported, and released a moment later
        assert not take(record.run).lost
    else:
        with pytest.raises(UsageError, match="belongs to"):
            take(record.run)
    releasing.join()


def test_a_leftover_that_still_saves_something_is_waited_for(tmp_path: Path) -> None:
    """It takes ten times the grace, and is not killed: more and more of its state is on disk."""
    code = """\
import json, signal, sys, time
from pathlib import Path
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
print("ready", flush=True)
while not stopped:
    time.sleep(0.01)
report = Path(sys.argv[1])
for saved in range(20):
    written = report.with_name("new")
    written.write_text(json.dumps(
        {"attempt": 1, "state": "stopping", "doing": "input", "saving": saved}
    ))
    written.replace(report)
    time.sleep(0.1)
"""
    run = RunDir(tmp_path)
    run.create()
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.born = "running", 1
    argv = [sys.executable, "-I", "-S", "-c", code, str(run.worker("a"))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state.modules["a"].pid, state.modules["a"].born = process.pid, process_birth(process.pid)
        state.write(run)
        end_leftovers(run, RunState.read(run), 0.2)
        assert process.poll() == 0


OBEDIENT = "import time; print('ready', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEDIENT}"


@pytest.mark.parametrize(
    ("code", "number"), [(OBEDIENT, signal.SIGTERM), (STUBBORN, signal.SIGKILL)]
)
def test_whoever_is_left_is_gone_afterwards(tmp_path: Path, code: str, number: int) -> None:
    run = RunDir(tmp_path)
    run.create()
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.born = "running", 1  # a supervisor of long ago
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state.modules["a"].pid, state.modules["a"].born = process.pid, process_birth(process.pid)
        state.write(run)
        found = RunState.read(run)
        assert found.phase == "unsupervised"
        grace_s = 30 if number == signal.SIGTERM else 0.2
        assert end_leftovers(run, found, grace_s).phase == "lost"
        assert process.poll() == -number
