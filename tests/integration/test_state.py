"""Processes that a run's state names, and those that have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dni_runtime.run.documents.state import RunState, process_birth
from dni_runtime.run.rundir import RunDir


def test_a_dead_supervisor_is_noticed(run: RunDir) -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    state = RunState.begin("process", 1, ["a"])
    state.pid, state.born = process.pid, process_birth(process.pid)
    process.communicate()
    state.save(run)
    assert RunState.read(run).phase == "lost"


def test_birth_of_a_process_with_an_odd_name(tmp_path: Path) -> None:
    link = tmp_path / "a) R 1 (b"
    link.symlink_to(sys.executable)
    process = subprocess.Popen([str(link), "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own, birth = process_birth(os.getpid()), process_birth(process.pid)
        assert own is not None
        assert birth is not None
        assert birth >= own
    finally:
        process.communicate(b"\n")
    assert process_birth(process.pid) is None


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_birth(process.pid) is None
    process.wait()
