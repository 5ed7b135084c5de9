"""One command for all ranks, and the state of a run that only its workers report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

import pytest

from dni_runtime.api.run import Run
from dni_runtime.errors import UsageError
from dni_runtime.plan.create import create_run
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.plan.settings import Site, StartRequest, StartSettings, make_plan
from dni_runtime.run.documents.reports import Report, WorkerPhase
from dni_runtime.run.record import Record
from dni_runtime.schedulers.mpi import Mpi, judge, mpirun_command
from dni_runtime.schedulers.schedulers import read_state
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.data import LabelsSpec
from dni_runtime.spec.modules import ElasticSpec
from tests.unit.runs import write_over

SITE = Site("process")


def plan_of(chain: ChainSpec, workers: Sequence[WorkerSpec], root: Path) -> LaunchPlan:
    return Mpi().plan(StartRequest(chain, workers, StartSettings(root, scheduler="mpi"), SITE))


@pytest.mark.parametrize("place", [0, 1, -1])
def test_replicas_that_agree_are_started_together(
    place: int, chain: ChainSpec, workers: tuple[WorkerSpec, ...], tmp_path: Path
) -> None:
    several = list(workers)
    name = several[place].module
    several[place : place + 1 or None] = [
        several[place].model_copy(
            update={"module": f"{name}.{n}", "replica": n, "replicas": 2, "backend": "gloo"}
        )
        for n in (1, 2)
    ]
    command = mpirun_command(plan_of(chain, several, tmp_path))
    assert command.startswith("mpirun -n 4 ")
    assert command.endswith(" --start $(date +%s)")
    with pytest.raises(UsageError, match=f"of '{name}' must be started together"):
        make_plan(StartRequest(chain, several, StartSettings(tmp_path, by_hand=True), SITE))
    together = make_plan(StartRequest(chain, several, StartSettings(tmp_path), SITE))
    assert together.restart.scope == "chain"


def test_ranks_have_no_data_of_their_own(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], tmp_path: Path
) -> None:
    own = chain.model_copy(
        update={"data": chain.data.model_copy(update={"path": "/site/{replica}.npz"})}
    )
    first = workers[0].model_copy(update={"replicas": 2})
    with pytest.raises(UsageError, match="replicas of 'bottom' have data of their own"):
        plan_of(own, (first, *workers[1:]), tmp_path)
    labels = LabelsSpec(dataset="npz", path="/site/labels.npz")
    apart = chain.model_copy(update={"data": chain.data.model_copy(update={"labels": labels})})
    with pytest.raises(UsageError, match="the labels are data of their own"):
        plan_of(apart, workers, tmp_path)


def test_nobody_changes_the_number_of_replicas(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], tmp_path: Path
) -> None:
    def of(start: int) -> LaunchPlan:
        spec = ElasticSpec(start=start, most=2)
        modules = [one.model_copy(update={"replicas": spec}) for one in chain.modules]
        return plan_of(chain.model_copy(update={"modules": tuple(modules)}), workers, tmp_path)

    with pytest.raises(UsageError, match="replicas of bottom, middle, top may change") as caught:
        of(1)
    assert "replicas: 2" in str(caught.value.hint)
    of(2)


def reports(*states: WorkerPhase | None, **codes: int) -> dict[str, Report]:
    """Reports of workers a, b, c; None: it has not reported."""
    return {
        name: Report()
        if state is None
        else Report(module=name, attempt=2, state=state, exit_code=codes.get(name), error="no GPU")
        for name, state in zip("abc", states, strict=False)
    }


@pytest.mark.parametrize(
    ("states", "living", "phase"),
    [
        ((None, None), "", "new"),
        (("running", None), "a", "starting"),
        (("connecting", "stopped"), "a", "starting"),  # b is about to start again
        (("running", "running"), "ab", "running"),
        (("finished", "running"), "b", "running"),
        (("stopped", "running"), "b", "stopping"),
        (("stopping", "running"), "ab", "stopping"),
        (("finished", "finished"), "", "finished"),
        (("stopped", "stopped"), "", "stopped"),
        (("finished", "stopped"), "", "stopped"),
        (("running", "stopped"), "", "lost"),
    ],
)
def test_the_state_that_the_reports_show(
    states: tuple[WorkerPhase | None, ...], living: str, phase: str
) -> None:
    state = judge(reports(*states), set(living))
    assert state.phase == phase
    assert state.exit_code == {"finished": 0, "stopped": 75}.get(phase)
    assert (state.ended is None) == (phase in ("new", "starting", "running", "stopping"))


def test_the_module_that_has_failed_is_named() -> None:
    state = judge(reports("stopped", "failed", "running", b=69), set())
    assert (state.phase, state.failed, state.exit_code) == ("failed", "b", 70)
    assert state.error == "b: no GPU"
    assert {name: one.state for name, one in state.modules.items()} == {
        "a": "stopped", "b": "failed", "c": "failed",
    }  # fmt: skip
    assert judge(reports("failed", "stopped", a=79), set()).exit_code == 79
    killed = judge(reports("running", "stopped"), set())
    assert killed.error == "killed before they could report why: a"


@pytest.fixture
def record(tmp_path: Path, prepared: CheckedChain) -> Record:
    """The record of a fresh run for mpirun."""
    root = tmp_path / "runs" / "small-1"
    create_run(root, prepared, backend="process", scheduler="mpi")
    return Record.read(root)


def report(record: Record, state: WorkerPhase) -> None:
    for name in record.modules:
        one = Report(module=name, attempt=1, state=state, host=gethostname(), pid=os.getpid())
        one.write(record.run.worker(name))


def test_a_run_is_read_by_its_reports(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_state(record.run).phase == "new"
    report(record, "running")
    state = read_state(record.run)
    assert (state.phase, state.backend) == ("running", "process")
    assert state.modules["top"].log == str(record.run.log("top", 1))
    with pytest.raises(UsageError, match="no supervisor can restart a module"):
        Run(record).restart("top")
    with pytest.raises(UsageError, match="is running"):
        Run(record).resume()
    monkeypatch.setattr("dni_runtime.api.run._STOP_TIMEOUT_S", 0.1)
    with pytest.raises(UsageError, match=r"is still running\n.*end the mpirun"):
        Run(record).stop(0)


def test_the_last_checkpoint_belongs_to_the_end(record: Record) -> None:
    """A part may show late, where another host has written it; later it is lost."""
    report(record, "finished")
    assert read_state(record.run).phase == "stopping"
    for name in record.modules:
        Report(module=name, attempt=1, state="finished").write(record.run.worker(name))
        os.utime(record.run.worker(name), (1, 1))
    state = read_state(record.run)
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert state.error == "the last checkpoint is not complete"
    for name in record.modules:
        write_over(record.run, name)
    state = read_state(record.run)
    assert (state.phase, state.exit_code, state.error) == ("finished", 0, None)


def test_to_resume_is_to_call_mpirun_again(record: Record) -> None:
    for name in record.modules:  # killed
        Report(module=name, attempt=1, state="running").write(record.run.worker(name))
        os.utime(record.run.worker(name), (1, 1))
    assert read_state(record.run).phase == "lost"
    with pytest.raises(UsageError, match=r"mpirun -n 3 .* --by-rank"):
        Run(record).resume()
    report(record, "stopped")
    assert Run(record).wait().phase == "stopped"
    with pytest.raises(UsageError, match=r"mpirun -n 3 .* --by-rank"):
        Run(record).resume()
