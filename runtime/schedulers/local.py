"""The scheduler ``local``: workers are processes of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dni_runtime.plan.plan import LaunchPlan, WorkerPlan
from dni_runtime.plan.settings import StartRequest, make_plan
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.processes import LocalStarter, Starter
from dni_runtime.schedulers.runtimes import worker_argv
from dni_runtime.schedulers.slurm.nodes import JobNodes


class Scheduler:
    """Runs the workers of a run on this host; others differ in where and how.

    Logs are files in the run directory, whatever starts the workers.
    """

    def plan(self, request: StartRequest) -> LaunchPlan:
        """Plan a start of a run, whose request says what this host offers; writes nothing."""
        return make_plan(request)

    def check(self, plan: LaunchPlan) -> None:
        """Check that workers can be started on the hosts of a plan."""

    def take_over(self, record: Record) -> bool:
        """Clear the way for a background supervisor; return whether its hosts need a new plan."""
        return False

    def command(self, worker: WorkerPlan) -> Sequence[str]:
        """Return the command of this host that runs a worker."""
        return worker_argv(worker)

    def starter(self, environ: Mapping[str, str]) -> Starter:
        """Return what starts and kills workers; a plan's own variables extend ``environ``."""
        return LocalStarter(environ)

    def hosts(self, plan: LaunchPlan) -> JobNodes | None:
        """Return the hosts of a plan's workers, if a host can be lost and its modules moved."""
        return None

    def clean_up(self, plan: LaunchPlan) -> None:
        """Remove what a run has left on its hosts."""

    def describe(self, runs: Sequence[RunDir], states: Sequence[RunState]) -> list[RunState]:
        """Complete the states of this scheduler's runs; ``runs`` may have those of others, too."""
        return list(states)

    def cancel(self, run: RunDir) -> None:
        """Cancel a start that waits for its hosts."""
