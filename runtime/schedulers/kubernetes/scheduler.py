"""The scheduler ``kubernetes``: workers that find their replica by their pod's index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dni_runtime.errors import UsageError
from dni_runtime.plan.plan import DATA_TARGET, LaunchPlan, WorkerPlan
from dni_runtime.plan.settings import StartRequest, make_plan
from dni_runtime.schedulers.mpi import Mpi, check_ranks
from dni_runtime.worker.start import STARTED_WITH


class Kubernetes(Mpi):
    """Workers in pods that a Job or a StatefulSet of their module replaces: no supervisor."""

    def plan(self, request: StartRequest) -> LaunchPlan:
        chain, site = request.chain, request.site
        check_ranks(request, "Kubernetes")
        if chain.mounts:
            raise UsageError(
                "'mounts' are folders of this host, which pods do not see",
                hint="leave them out; data come by --data-claim, files by the image",
            )
        front = () if request.front is None else (request.front,)
        links = {worker.module: ("tcp", "$(POD_IP)") for worker in (*request.workers, *front)}
        plan = make_plan(replace(request, site=replace(site, links=links)))
        ours = {STARTED_WITH, "PYTHONPATH"}

        def pod(worker: WorkerPlan) -> WorkerPlan:
            data = worker.data
            if data is not None:
                folder = Path(data) not in site.files
                data = str(DATA_TARGET if folder else DATA_TARGET / Path(data).name)
            environment = {k: v for k, v in worker.environment.items() if k not in ours}
            return replace(worker, by_rank=True, data=data, environment=environment)

        there = None if plan.front is None else pod(plan.front)
        return replace(plan, workers=tuple(map(pod, plan.workers)), front=there)

    def check(self, plan: LaunchPlan) -> None:
        """Always raises: a cluster starts these workers."""
        raise UsageError(
            "this run is started by Kubernetes, not by dnictl",
            hint="it goes on when its objects are applied again: see docs/kubernetes.md",
        )
