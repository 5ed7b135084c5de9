"""The scheduler ``local``: workers are processes of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dni_runtime.documents.state import RunState
from dni_runtime.launch.plan import LaunchPlan, WorkerPlan
from dni_runtime.launch.processes import Hosts, LocalStarter, Starter
from dni_runtime.launch.records import Record
from dni_runtime.launch.runtimes import worker_argv
from dni_runtime.launch.settings import Site, StartSettings, make_plan
from dni_runtime.rundir import RunDir
from dni_runtime.spec import ChainSpec, WorkerSpec


class Local:
    """Runs workers on this host; see :class:`dni_runtime.launch.schedulers.Scheduler`."""

    elsewhere = False

    def plan(
        self,
        chain: ChainSpec,
        workers: Sequence[WorkerSpec],
        settings: StartSettings,
        site: Site,
    ) -> LaunchPlan:
        return make_plan(chain, workers, settings, site)

    def check(self, plan: LaunchPlan) -> None:
        pass

    def take_over(self, record: Record, state: RunState) -> LaunchPlan | None:
        return LaunchPlan.read(record.run)

    def command(self, worker: WorkerPlan) -> Sequence[str]:
        return worker_argv(worker)

    def starter(self, environ: Mapping[str, str]) -> Starter:
        return LocalStarter(environ, tied=False)  # a later supervisor adopts them

    def hosts(self, plan: LaunchPlan) -> Hosts | None:
        return None

    def clean_up(self, plan: LaunchPlan) -> None:
        pass

    def describe(self, runs: Sequence[RunDir], states: Sequence[RunState]) -> list[RunState]:
        return list(states)

    def cancel(self, run: RunDir) -> None:
        pass
