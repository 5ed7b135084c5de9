"""Workers that one launcher starts together: which one this process is, and how they end.

``mpirun``, ``srun`` and an Indexed Job of Kubernetes give all processes the same command. The
launcher's variables give each a rank, which is its place in the run's list of workers, replicas
included; if the command names a module, in that of the module's replicas.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from dni_runtime.errors import UsageError
from dni_runtime.run.documents.reports import ENDED, Report
from dni_runtime.run.documents.requests import Stop
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.background import repeating
from dni_runtime.worker.signals import StopRequest

JOB_INDEX = "JOB_COMPLETION_INDEX"
"""Set by an Indexed Job of Kubernetes, with a pod for each rank: a dead one is replaced alone."""

LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and Intel MPI (Hydra); srun --mpi=pmi2
    (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
    ),  # srun with any --mpi; a batch script lacks the second
    ("PMIX_RANK", None),  # other launchers with PMIx, which has no variable for the size
    (JOB_INDEX, None),
)
"""Variables of rank and size. The first pair that is set counts: the innermost launcher's, because
a batch script's ``mpirun`` inherits Slurm's variables."""

_LOOK_S = 1.0
_END_LOOK_S = 0.1
_SAVES = 10  # times the limit, without progress


def worker_of_rank(environ: Mapping[str, str], workers: Sequence[str]) -> str:
    """Return the worker that this process is: its rank is a place in ``workers``, head first."""
    for rank_name, size_name in LAUNCHERS:
        if rank_name in environ and (size_name is None or size_name in environ):
            break
    else:
        names = ", ".join(name for name, _ in LAUNCHERS)
        raise UsageError(
            f"--by-rank: this process has no rank: no launcher has set any of {names}",
            hint="start it with mpirun, mpiexec or srun (--cleanenv hides what they set), or name "
            "the module with --module",
        )
    rank, size = _number(environ, rank_name), len(workers)
    if size_name is not None:
        size = _number(environ, size_name)
    if size != len(workers) or rank >= size:
        started = f" of {size} ({size_name})" if size_name is not None else ""
        raise UsageError(
            f"--by-rank: this is process {rank} ({rank_name}){started}, but the run has "
            f"{len(workers)} workers: {', '.join(workers)}",
            hint=f"start one process for each: mpirun -n {len(workers)}",
        )
    return workers[rank]


def start_of(spec: WorkerSpec, number: int | None) -> int:
    """Return which start of the whole chain this is: what ``--start`` says.

    Replicas of the head and of the tail agree by files, in which lines of earlier starts are left,
    and so do those that form a process group: they need it.
    """
    agrees = spec.head is not None or spec.tail is not None or spec.backend is not None
    if number is None and spec.replicas > 1 and agrees:
        raise UsageError(
            f"--by-rank: {spec.module!r} must know which start of the chain this is",
            hint="add --start $(date +%s) to the command of all ranks",
        )
    return number or 0


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise UsageError(f"--by-rank: {name}={environ[name]!r} is not a number")
    return int(environ[name])


def heeding_stop(run: RunDir, stop: StopRequest) -> contextlib.AbstractContextManager[None]:
    """Stop, in a thread, when ``dnictl stop`` is called: no supervisor passes it on."""
    former = Stop.peek(run.stop_request)  # what stopped an earlier start

    def look() -> None:
        if Stop.peek(run.stop_request) not in (None, former):
            stop.stop()

    return repeating("stop", _LOOK_S, look)


def wait_for_others(run: RunDir, workers: Sequence[str], within_s: float) -> None:
    """Wait until all workers have saved their state and ended.

    ``mpirun`` kills all processes when one exits with another status than 0, and that is how a
    stopped worker exits. ``within_s`` is extended while one makes progress with its checkpoint.
    """
    until_s, saved = time.monotonic() + within_s, None
    while active := [
        report for report in map(Report.read, map(run.worker, workers)) if report.state not in ENDED
    ]:
        saving = [report.saving for report in active if report.saving is not None]
        if saving and saving != saved:
            saved, until_s = saving, time.monotonic() + _SAVES * within_s
        if time.monotonic() >= until_s:
            return
        time.sleep(_END_LOOK_S)
