"""What a run's own state and Slurm's word mean together."""

from __future__ import annotations

import pytest

from dni_runtime.run.documents.state import RunPhase, RunState
from dni_runtime.schedulers.slurm.commands import JobInfo
from dni_runtime.schedulers.slurm.scheduler import judge


@pytest.mark.parametrize(
    ("phase", "info", "told", "meaning", "word"),
    [
        ("new", JobInfo("PENDING", "Resources"), False, "queued", "waits: Resources"),
        ("new", JobInfo("RUNNING"), False, "starting", None),
        ("new", JobInfo("CANCELLED"), False, "lost", "ended as CANCELLED before the run started"),
        ("new", JobInfo("CANCELLED"), True, "stopped", "cancelled"),
        ("new", None, False, "lost", "disappeared before the run started"),
        ("stopped", JobInfo("PENDING", "BeginTime"), False, "queued", "waits: BeginTime"),
        ("stopped", JobInfo("RUNNING"), False, "stopping", None),
        ("stopped", JobInfo("COMPLETING"), False, "stopping", None),
        ("stopped", JobInfo("COMPLETING"), True, "stopped", None),
        ("running", JobInfo("COMPLETING"), False, "stopping", None),
        ("stopped", None, False, "stopped", None),
        ("running", JobInfo("RUNNING"), False, "running", None),
        ("running", JobInfo("TIMEOUT", "TimeLimit"), False, "lost", "TIMEOUT (TimeLimit)"),
        ("lost", JobInfo("NODE_FAIL"), False, "lost", "ended as NODE_FAIL"),
        ("lost", JobInfo("PENDING", "BeginTime"), False, "queued", "BeginTime"),
        ("lost", JobInfo("RUNNING"), False, "starting", None),
    ],
)
def test_together(
    phase: RunPhase, info: JobInfo | None, told: bool, meaning: RunPhase, word: str | None
) -> None:
    state = judge(RunState(phase=phase, modules={}), "12", info, told_to_stop=told)
    assert state.phase == meaning
    if word is None:
        assert state.error is None
    else:
        assert "job 12" in str(state.error)
        assert word in str(state.error)
