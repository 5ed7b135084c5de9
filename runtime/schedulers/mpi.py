"""The scheduler ``mpi``: ``mpirun`` or ``srun`` starts all workers of a run, by one command.

It is the user who calls it: in a job's script, with the site's options. So such a run has no
supervisor; its state follows from the reports of its workers (``worker/options.py`` is their side).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from socket import gethostname

from dni_runtime.errors import DivergedError, StoppedError, UsageError, WorkerError
from dni_runtime.files import written_lately
from dni_runtime.plan.plan import SOCKETS_TARGET, LaunchPlan, WorkerPlan
from dni_runtime.plan.settings import UNSUPERVISED, StartRequest, make_plan
from dni_runtime.run.cuts import NOT_OVER, is_over
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.documents.reports import ENDED, Report
from dni_runtime.run.documents.state import ModuleState, RunState, process_birth
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.local import Scheduler
from dni_runtime.schedulers.runtimes import worker_argv
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of

_CODES = {"finished": 0, "stopped": StoppedError.exit_code}
_SILENCE_S = 90.0  # a shared file system may show a report late


class Mpi(Scheduler):
    """Workers that find their modules by rank."""

    def plan(self, request: StartRequest) -> LaunchPlan:
        chain, workers = request.chain, request.workers
        check_ranks(request, "mpirun")
        if chain.links.transport == "auto" and chain.links.interface is not None:
            # where the ranks will run is not known
            links = {worker.module: ("tcp", None) for worker in workers}
            request = replace(request, site=replace(request.site, links=links))
        plan = make_plan(request)
        # All ranks have the same command: any image of the chain, and what any worker needs.
        mounts = dict.fromkeys(mount for worker in plan.workers for mount in worker.mounts)
        rank = replace(
            plan.workers[0],
            by_rank=True,
            mounts=tuple(mount for mount in mounts if mount.target != SOCKETS_TARGET),
            gpu=next((worker.gpu for worker in plan.workers if worker.gpu), None),
            transport=plan.workers[-1].transport,
            environment={},
        )
        ranks = tuple(
            replace(rank, module=worker.module, log=worker.log) for worker in plan.workers
        )
        return replace(plan, workers=ranks)

    def command(self, worker: WorkerPlan) -> Sequence[str]:
        return worker_argv(replace(worker, module="", ipc="", attempt=1))

    def check(self, plan: LaunchPlan) -> None:
        """Always raises: ``mpirun`` starts these workers. The error shows the command."""
        raise UsageError(
            "this run is started by mpirun or srun, on the hosts that they choose, not by dnictl",
            hint=f"continue it with: {mpirun_command(plan)}",
        )

    def describe(self, runs: Sequence[RunDir], states: Sequence[RunState]) -> list[RunState]:
        return [_describe(run, state) for run, state in zip(runs, states, strict=True)]


def check_ranks(request: StartRequest, launcher: str) -> None:
    """Refuse what needs a supervisor, or a command of each worker's own."""
    chain, workers = request.chain, request.workers
    apart = "the labels are" if chain.data.splits else None
    if workers[0].replicas > 1 and chain.data.per_replica:
        apart = f"the replicas of {module_of(workers[0].module)!r} have"
    if apart is not None:
        raise UsageError(
            f"{apart} data of their own, but all ranks get the same command",
            hint="use 'dnictl up' or 'dnictl submit', or a data set that they share",
        )
    if chain.callbacks:
        raise UsageError(
            f"a run that {launcher} starts has no supervisor, which would call the 'callbacks'",
            hint="use 'dnictl up' or 'dnictl submit', or leave them out",
        )


def mpirun_argv(plan: LaunchPlan) -> list[str]:
    """Return the command that starts all workers of a plan of :class:`Mpi`."""
    return ["mpirun", "-n", str(len(plan.workers)), *Mpi().command(plan.workers[0])]


def mpirun_command(plan: LaunchPlan) -> str:
    """Return it for a shell, with the number of the start, which replicas may need."""
    names = [worker.module for worker in plan.workers]
    replicated = len(replicas_of(names)) < len(names)
    return shlex.join(mpirun_argv(plan)) + (" --start $(date +%s)" if replicated else "")


def _describe(run: RunDir, state: RunState) -> RunState:
    if state.phase != "new":  # it has a supervisor
        return state
    record = RunRecord.load(run.record)
    if record is None or record.scheduler not in UNSUPERVISED:
        return state
    reports = {name: Report.read(run.worker(name)) for name in record.modules}
    state = judge(reports, {name for name, report in reports.items() if _lives(run, report)})
    if state.phase == "finished" and not is_over(run, record.modules):
        if any(_lately(run, report) for report in reports.values()):  # a part may show late
            state.phase, state.exit_code, state.ended = "stopping", None, None
        else:
            state.phase, state.exit_code, state.error = "stopped", StoppedError.exit_code, NOT_OVER
    for name, module in state.modules.items():
        module.log = str(run.log(name, module.attempt))
    return state.model_copy(update={"backend": record.backend})


def judge(reports: Mapping[str, Report], living: set[str]) -> RunState:
    """Return the state of a run that its workers' reports show (pure).

    The reports are the newest ones, head first; false if a worker has not reported yet. ``living``
    are the workers that still run.
    """
    if not any(reports.values()):
        return RunState(modules={})
    modules = {
        name: ModuleState(
            state="new" if not report else report.state,
            attempt=report.attempt,
            exit_code=_CODES.get(report.state, report.exit_code),
        )
        for name, report in reports.items()
    }
    for name, module in modules.items():
        if module.state not in ENDED and module.state != "new" and name not in living:
            module.state = "failed"  # killed: it could not report that
    state = RunState(
        attempt=min(report.attempt for report in reports.values() if report), modules=modules
    )
    phases = {module.state for module in modules.values()}
    if living:
        # reports of those that have not started yet are an earlier start's
        if phases & {"new", "starting", "connecting"}:
            state.phase = "starting"
        else:
            state.phase = "running" if phases <= {"running", "finished"} else "stopping"
        return state
    state.ended = max(report.time for report in reports.values())
    if phases == {"finished"}:
        state.phase, state.exit_code = "finished", 0
    elif phases <= {"finished", "stopped"}:
        state.phase, state.exit_code = "stopped", StoppedError.exit_code
    elif codes := {
        name: report.exit_code
        for name, report in reports.items()
        if report.state == "failed" and report.exit_code
    }:
        state.failed = min(codes, key=lambda name: reports[name].time)
        diverged = codes[state.failed] == DivergedError.exit_code
        state.exit_code = DivergedError.exit_code if diverged else WorkerError.exit_code
        state.phase, state.error = "failed", f"{state.failed}: {reports[state.failed].error}"
    else:
        gone = ", ".join(
            name for name, module in modules.items() if module.state in ("failed", "new")
        )
        state.phase, state.error = "lost", f"killed before they could report why: {gone}"
    return state


def _lives(run: RunDir, report: Report) -> bool:
    if not report or report.state in ENDED:
        return False
    if report.host == gethostname():
        born = process_birth(report.pid or 0)
        return born is not None and report.born in (None, born)
    return _lately(run, report)


def _lately(run: RunDir, report: Report) -> bool:
    return written_lately(run.worker(report.module), report.time, _SILENCE_S)
