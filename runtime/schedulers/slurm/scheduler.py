"""The scheduler ``slurm``: workers are steps of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dni_runtime.errors import UnavailableError
from dni_runtime.files import written_lately
from dni_runtime.plan.plan import LaunchPlan, WorkerPlan
from dni_runtime.plan.settings import StartRequest
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.local import Scheduler
from dni_runtime.schedulers.processes import Starter
from dni_runtime.schedulers.slurm import commands
from dni_runtime.schedulers.slurm.commands import JobInfo, job_infos
from dni_runtime.schedulers.slurm.nodes import JobNodes
from dni_runtime.schedulers.slurm.steps import SlurmStarter, end_steps, step_argv

_FRESH_S = 25.0
"""Age up to which a state is current: the heartbeat of 10 s plus file system caches."""


def judge(
    state: RunState, job: str, info: JobInfo | None, *, told_to_stop: bool, again: bool = False
) -> RunState:
    """Combine a run's own state and its job's state (pure).

    ``info`` is None if Slurm no longer knows the job. ``again``: the state is of the time before
    the job, by which the run is resumed.
    """
    if info is not None and info.alive:
        if info.pending:
            reason = f": {info.reason}" if info.reason else ""
            return state.model_copy(update={"phase": "queued", "error": f"job {job} waits{reason}"})
        if state.phase == "stopped" and not again:  # its script is about to end, or to requeue it
            return state.model_copy(update={"phase": "stopping"})
        begins = {"phase": "starting", "error": None, "exit_code": None}
        return state if state.active else state.model_copy(update=begins)
    if told_to_stop and (again or state.phase == "stopped"):
        return state
    if info is not None and info.completing:  # it ends or is requeued: the next poll shows
        return state.model_copy(update={"phase": "stopping"})
    if state.phase == "stopped" and not again:
        return state
    if told_to_stop and state.phase == "new":
        return state.model_copy(
            update={"phase": "stopped", "exit_code": 75, "error": f"job {job} was cancelled"}
        )
    how = "disappeared" if info is None else f"ended as {info.state}"
    reason = f" ({info.reason})" if info is not None and info.reason else ""
    when = "before the run started" if state.phase == "new" else "before the run finished"
    return state.model_copy(
        update={"phase": "lost", "error": f"Slurm job {job} {how}{reason} {when}"}
    )


class Slurm(Scheduler):
    """Runs workers as steps of a job; its supervisor runs within the job."""

    def plan(self, request: StartRequest) -> LaunchPlan:
        from dni_runtime.schedulers.slurm.allocation import plan_in_allocation

        return plan_in_allocation(request)

    def take_over(self, record: Record) -> bool:
        from dni_runtime.schedulers.slurm.allocation import own_allocation

        end_steps(own_allocation(record.name).job, record.modules)  # of a killed supervisor
        return True

    def command(self, worker: WorkerPlan) -> Sequence[str]:
        return step_argv(worker)

    def starter(self, environ: Mapping[str, str]) -> Starter:
        job = commands.own_job()
        assert job is not None  # the plan is one of this job
        return SlurmStarter(job, environ)

    def hosts(self, plan: LaunchPlan) -> JobNodes | None:
        from dni_runtime.schedulers.slurm.allocation import allocation_here

        allocation = allocation_here()
        assert allocation is not None  # the plan is one of this job
        several = len({worker.node for worker in plan.workers}) > 1
        return JobNodes(allocation.job, plan, allocation.hosts) if several else None

    def clean_up(self, plan: LaunchPlan) -> None:
        from dni_runtime.schedulers.slurm.allocation import clean_up

        clean_up(plan)

    def describe(self, runs: Sequence[RunDir], states: Sequence[RunState]) -> list[RunState]:
        """Complete the states of runs by one query to Slurm.

        A run's own state is out of date before its start, between two starts, and after its job was
        ended from outside.
        """
        jobs, resumed, due = dict[RunDir, str](), set[RunDir](), set[RunDir]()
        for run, state in zip(runs, states, strict=True):
            record = JobRecord.load(run.job)
            if record is None or record.job is None:
                continue
            if state.phase != "new" and state.attempt <= record.after:
                resumed.add(run)
            elif state.phase in ("finished", "failed") or (
                state.active and written_lately(run.state, state.updated, _FRESH_S)
            ):
                continue
            jobs[run] = record.job
            if run in resumed or state.phase == "new":
                due.add(run)
        try:
            infos = job_infos(sorted({*jobs.values()})) if jobs else {}
        except UnavailableError:  # that a job is to start a run, or to resume it, is known
            infos = {jobs[run]: JobInfo("PENDING", "Slurm does not answer") for run in due}
            jobs = {run: jobs[run] for run in due}
        return [
            judge(
                state,
                jobs[run],
                infos.get(jobs[run]),
                told_to_stop=run.stop_request.exists(),
                again=run in resumed,
            )
            if run in jobs
            else state
            for run, state in zip(runs, states, strict=True)
        ]

    def cancel(self, run: RunDir) -> None:
        record = JobRecord.load(run.job)
        if record is not None and record.job is not None:
            commands.cancel(record.job)
