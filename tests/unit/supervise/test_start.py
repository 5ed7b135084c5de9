"""How a launch ends, and that of a run which ends just now."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from dni_runtime.errors import UsageError, WorkerError
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.run.documents.state import RunPhase, RunState
from dni_runtime.run.lease import Lease, LeaseError
from dni_runtime.run.record import Record
from dni_runtime.schedulers.local import Scheduler
from dni_runtime.schedulers.schedulers import SCHEDULERS
from dni_runtime.supervise.start import Launch, take


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
    state = RunState.begin("process", 1, ["stem"])
    state.model_copy(update={"phase": phase}).save(record.run)
    releasing = threading.Timer(0.3, lease.release)
    releasing.start()
    if phase == "stopped":  # reported, and released a moment later
        assert not take(record.run).lost
    else:
        with pytest.raises(UsageError, match="belongs to"):
            take(record.run)
    releasing.join()
