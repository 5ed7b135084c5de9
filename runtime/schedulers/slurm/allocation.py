"""Planning a run inside an allocation, with its workers as steps of the job."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.image.apptainer import Mount
from dni_runtime.plan.host import infiniband_mounts
from dni_runtime.plan.placement import link_kinds, needs_of
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.plan.prepare import CheckedChain, importing_from
from dni_runtime.plan.settings import StartRequest, make_plan
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.rundir import RunDir, socket_path
from dni_runtime.schedulers.slurm import commands
from dni_runtime.schedulers.slurm.nodes import nodes_of
from dni_runtime.schedulers.slurm.profiles import load_profile
from dni_runtime.schedulers.slurm.script import JobRequest
from dni_runtime.schedulers.slurm.steps import step_args
from dni_runtime.schedulers.slurm.submit import job_record, make_request
from dni_runtime.spec.profile import ProfileSpec

_CLEAN_TIMEOUT_S = 30.0

OUTSIDE = "if this is an ordinary shell: 'unset SLURM_JOB_ID', or start workers on this host with "
OUTSIDE += "--backend process or apptainer"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Allocation:
    """The nodes of this process's job."""

    job: str  # its id
    hosts: tuple[str, ...]  # names of its nodes, as Slurm prints them


def allocation_here(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Return the allocation that this process runs in, or None."""
    environ = os.environ if environ is None else environ
    job, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    if environ.get("SLURM_HET_SIZE"):
        raise UsageError(
            f"job {job} is heterogeneous, and a run is placed in one component",
            hint="use 'dnictl submit', or an allocation of one component",
        )
    try:
        return Allocation(job, tuple(commands.hostnames(nodes)))
    except UnavailableError as error:
        raise UnavailableError(
            f"SLURM_JOB_ID={job} says that this is in a Slurm job, whose nodes are not known: "
            f"{error.message}",
            hint=OUTSIDE,
        ) from None


def plan_in_allocation(request: StartRequest) -> LaunchPlan:
    """Plan a start of a run's workers as steps of this process's job."""
    chain, workers = request.chain, request.workers
    settings, site = request.settings, request.site
    allocation = own_allocation(settings.run.name)
    job = settings.job or JobRecord.load(RunDir(settings.run).job)
    assert job is not None
    count = max(job.nodes) + 1
    if len(allocation.hosts) < count:
        raise UnavailableError(
            f"the run's modules are placed on {count} nodes, but job {allocation.job} has "
            f"{len(allocation.hosts)} ({', '.join(allocation.hosts)})",
            hint="submit it again with more nodes or another placement",
        )
    profile, mounts = job.settings, site.mounts
    if site.backend == "apptainer":
        # checked on this node, the first; the nodes of one job are alike
        binds = ((bind.removesuffix(":ro"), bind.endswith(":ro")) for bind in profile.binds)
        mounts = (
            *(*mounts, *infiniband_mounts(chain.infiniband)),
            *(Mount(path, path, read_only=read_only) for path, read_only in binds),
        )
    kinds = link_kinds(chain, workers, profile.interface, job.nodes)
    interface = chain.links.interface or profile.interface
    site = replace(
        site,
        # A local folder of each node; XDG_RUNTIME_DIR does not exist on nodes without a login.
        sockets=socket_path(settings.run, Path("/tmp")),
        mounts=mounts,
        # the interface also for ipc: moved to another node, the module listens on tcp
        links={name: (transport, interface) for name, (transport, _) in kinds.items()},
        container_args=profile.container_args,
        scratch=os.environ.get("DNI_SCRATCH", ""),
    )
    settings = replace(settings, log_level=job.log_level)
    plan = make_plan(replace(request, settings=settings, site=site))
    needs = needs_of(chain, workers)
    any_gpus = any(need.gpus for need in needs)
    steps = [
        replace(
            worker,
            node=allocation.hosts[number],
            need=need,
            scheduler_args=step_args(need, profile=profile, any_gpus=any_gpus),
        )
        for worker, need, number in zip(plan.workers, needs, job.nodes, strict=True)
    ]
    return replace(plan, workers=tuple(steps))


def own_allocation(run: str) -> Allocation:
    """Return the allocation that this process runs in, for a run of its job."""
    allocation = allocation_here()
    if allocation is None:
        raise UsageError(
            f"run {run!r} belongs to a Slurm job, but this is not an allocation",
            hint=f"resume it with 'dnictl resume {run}'",
        )
    try:
        info = commands.job_infos([allocation.job]).get(allocation.job)
    except UnavailableError:  # who starts steps waits for Slurm
        return allocation
    if info is None or not info.alive:
        raise UnavailableError(
            f"SLURM_JOB_ID={allocation.job} says that this is in a Slurm job, which has ended",
            hint=OUTSIDE,
        )
    return allocation


def job_here(root: Path, prepared: CheckedChain, log_level: str) -> JobRecord:
    """Return the record of this allocation's job for a new run that is placed on its nodes."""
    allocation = allocation_here()
    if allocation is None:
        raise UsageError(
            "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: this is not an allocation",
            hint=OUTSIDE,
        )
    profile = os.environ.get("DNICTL_PROFILE")
    request = request_here(root, prepared, load_profile(profile), allocation)
    return job_record(request, profile, log_level, allocation.job)


def request_here(
    root: Path, prepared: CheckedChain, profile: ProfileSpec, allocation: Allocation
) -> JobRequest:
    """Return the job request of a chain on this allocation's nodes."""
    from dni_runtime.resolve.cost import estimated_costs  # torch

    with importing_from(prepared.base.absolute()):
        costs = estimated_costs(prepared.workers)
    placement = prepared.chain.placement
    most = min(len(allocation.hosts), len(prepared.replicas))
    return make_request(
        root,
        prepared,
        profile,
        python=sys.executable,
        nodes=most if placement.nodes is None and placement.strategy != "explicit" else None,
        costs=costs,
    )


def beside(hosts: Sequence[str]) -> list[str]:
    """Return the start of a command that runs on each node, beside its other steps."""
    return [
        *("srun", "--overlap", "--mem=0", "--cpus-per-task=1", "--quiet"),
        *(f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1"),
        f"--nodelist={','.join(hosts)}",
    ]


def clean_up(plan: LaunchPlan) -> None:
    """Remove the socket folders that a run's steps have created on their nodes."""
    allocation = allocation_here()
    if allocation is None:
        return
    hosts = nodes_of(allocation.job) or allocation.hosts  # one may be lost
    argv = [*beside(hosts), "--input=none", "rm", "-rf", "--", plan.sockets]
    try:
        code, _, err = commands.run_slurm(argv, timeout_s=_CLEAN_TIMEOUT_S)
    except UnavailableError as error:
        code, err = 1, str(error)
    if code != 0:
        log.warning("cannot remove %s on %s: %s", plan.sockets, ", ".join(hosts), err.strip())
