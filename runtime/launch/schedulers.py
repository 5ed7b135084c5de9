"""Schedulers: what starts the workers of a run, and on which hosts.

They are independent of the container runtimes (``launch/runtimes.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from dni_runtime.documents.state import RunState
from dni_runtime.launch.local import Local
from dni_runtime.launch.mpi import Mpi
from dni_runtime.launch.plan import LaunchPlan, WorkerPlan
from dni_runtime.launch.processes import Hosts, Starter
from dni_runtime.launch.records import Record
from dni_runtime.launch.settings import Site, StartSettings
from dni_runtime.launch.slurm.scheduler import Slurm
from dni_runtime.launch.ssh import Ssh
from dni_runtime.rundir import RunDir
from dni_runtime.spec import ChainSpec, WorkerSpec


class Scheduler(Protocol):
    """Runs the workers of a run; logs are files in the run directory, whatever starts them.

    ``elsewhere``: the workers run on other hosts, which share the files of this one.
    """

    @property
    def elsewhere(self) -> bool: ...

    def plan(
        self,
        chain: ChainSpec,
        workers: Sequence[WorkerSpec],
        settings: StartSettings,
        site: Site,
    ) -> LaunchPlan:
        """Plan a start of a run, with its workers given head first; writes nothing.

        ``site`` is what this host offers.
        """

    def check(self, plan: LaunchPlan) -> None:
        """Check that workers can be started on the hosts of a plan."""

    def take_over(self, record: Record, state: RunState) -> LaunchPlan | None:
        """Return the plan that a background supervisor starts; None if the run has finished."""

    def command(self, worker: WorkerPlan) -> Sequence[str]:
        """Return the command of this host that runs a worker."""

    def starter(self, environ: Mapping[str, str]) -> Starter:
        """Return what starts and kills workers; a plan's own variables extend ``environ``."""

    def hosts(self, plan: LaunchPlan) -> Hosts | None:
        """Return the hosts of a plan's workers, if a host can be lost and its modules moved."""

    def clean_up(self, plan: LaunchPlan) -> None:
        """Remove what a run has left on its hosts."""

    def describe(self, runs: Sequence[RunDir], states: Sequence[RunState]) -> list[RunState]:
        """Complete the states of this scheduler's runs; ``runs`` may have those of others, too."""

    def cancel(self, run: RunDir) -> None:
        """Cancel a start that waits for its hosts."""


SCHEDULERS: Mapping[str, Scheduler] = {
    "local": Local(),
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
