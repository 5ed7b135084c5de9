"""Schedulers: what starts the workers of a run, and on which hosts.

They are independent of the container runtimes (``launch/runtimes.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dni_runtime.documents.state import RunState
from dni_runtime.launch.local import Scheduler
from dni_runtime.launch.mpi import Mpi
from dni_runtime.launch.slurm.scheduler import Slurm
from dni_runtime.launch.ssh import Ssh
from dni_runtime.rundir import RunDir

SCHEDULERS: Mapping[str, Scheduler] = {
    "local": Scheduler(),
    "slurm": Slurm(),
    "ssh": Ssh(),
    "mpi": Mpi(),
}


def read_state(run: RunDir) -> RunState:
    """Return a run's state; see :func:`read_states`."""
    (state,) = read_states([run])
    return state


def read_states(runs: Sequence[RunDir]) -> list[RunState]:
    """Return the states of runs, as their supervisors, workers and schedulers report them."""
    states = [RunState.read(run) for run in runs]
    for scheduler in SCHEDULERS.values():
        states = scheduler.describe(runs, states)
    return states
