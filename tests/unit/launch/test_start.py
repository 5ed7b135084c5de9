"""Workers that go on without a supervisor are ended before their run goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dni_runtime.launch.start import end_leftovers
from dni_runtime.launch.state import RunState, process_birth
from dni_runtime.rundir import RunDir

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
