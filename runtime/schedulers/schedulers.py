"""Schedulers: what starts the workers of a run, and on which hosts.

They are independent of the container runtimes (``schedulers/runtimes.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.kubernetes.scheduler import Kubernetes
from dni_runtime.schedulers.local import Scheduler
from dni_runtime.schedulers.mpi import Mpi
from dni_runtime.schedulers.slurm.scheduler import Slurm
from dni_runtime.schedulers.ssh import Ssh

SCHEDULERS: Mapping[str, Scheduler] = {
    "local": Scheduler(),
    "slurm": Slurm(),
    "ssh": Ssh(),
    "mpi": Mpi(),
    "kubernetes": Kubernetes(),
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
