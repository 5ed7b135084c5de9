"""The scheduler ``slurm``: workers are steps of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dni_runtime.plan.plan import LaunchPlan, WorkerPlan
from dni_runtime.plan.settings import StartRequest
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.local import Scheduler
from dni_runtime.schedulers.processes import Hosts, Starter
from dni_runtime.schedulers.slurm import commands
from dni_runtime.schedulers.slurm.job import describe
from dni_runtime.schedulers.slurm.nodes import JobNodes
from dni_runtime.schedulers.slurm.starter import SlurmStarter, end_steps
from dni_runtime.schedulers.slurm.steps import step_argv


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
        return SlurmStarter(self._job(), environ)

    def hosts(self, plan: LaunchPlan) -> Hosts | None:
        from dni_runtime.schedulers.slurm.allocation import allocation_here

        allocation = allocation_here()
        assert allocation is not None  # the plan is one of this job
        several = len({worker.node for worker in plan.workers}) > 1
        return JobNodes(allocation.job, plan, allocation.hosts) if several else None

    def clean_up(self, plan: LaunchPlan) -> None:
        from dni_runtime.schedulers.slurm.allocation import clean_up

        clean_up(plan)

    def describe(self, runs: Sequence[RunDir], states: Sequence[RunState]) -> list[RunState]:
        return describe(runs, states)

    def cancel(self, run: RunDir) -> None:
        record = JobRecord.load(run.job)
        if record is not None and record.job is not None:
            commands.cancel(record.job)

    @staticmethod
    def _job() -> str:
        job = commands.own_job()
        assert job is not None  # the plan is one of this job
        return job
