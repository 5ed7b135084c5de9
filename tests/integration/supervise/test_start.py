"""Workers that go on without a supervisor are ended before their run goes on."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import RunState, process_birth
from dni_runtime.run.rundir import RunDir
from dni_runtime.supervise.start import end_leftovers


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
        state.save(run)
        end_leftovers(run, RunState.read(run), 0.2)
        assert process.poll() == 0


OBEDIENT = "import time; print('ready', flush=True); time.sleep(60)"


STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEDIENT}"


@pytest.mark.parametrize(
    ("code", "number"), [(OBEDIENT, signal.SIGTERM), (STUBBORN, signal.SIGKILL)]
)
def test_whoever_is_left_is_gone_afterwards(run: RunDir, code: str, number: int) -> None:
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.born = "running", 1  # a supervisor of long ago
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state.modules["a"].pid, state.modules["a"].born = process.pid, process_birth(process.pid)
        state.save(run)
        found = RunState.read(run)
        assert found.phase == "unsupervised"
        grace_s = 30 if number == signal.SIGTERM else 0.2
        assert end_leftovers(run, found, grace_s).phase == "lost"
        assert process.poll() == -number


@pytest.mark.parametrize("planned", [1, 2])
def test_a_worker_that_could_not_be_recorded_is_ended(run: RunDir, planned: int) -> None:
    """Its supervisor died between the start and the write of the state: the worker tells of itself.

    It is the first one of its module, or a restart that the plan knows and the state does not.
    """
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.born = "running", 1
    if planned == 2:
        state.modules["a"].pid, state.modules["a"].born = 1, 1  # of the one before
    state.save(run)
    run.plan.write_text(json.dumps({"workers": [{"module": "a", "attempt": planned}]}))
    argv = [sys.executable, "-I", "-S", "-c", OBEDIENT]
    with subprocess.Popen(argv, start_new_session=True) as process:
        report = Report(
            attempt=planned,
            pid=process.pid,
            born=process_birth(process.pid),
            host=socket.gethostname(),
            state="running",
        )
        run.worker("a").write_text(report.model_dump_json())
        found = RunState.read(run)
        assert found.phase == "unsupervised"
        end_leftovers(run, found, 30)
        assert process.poll() == -signal.SIGTERM
