"""What ``up``, ``resume`` and ``supervise`` do for runs of Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UsageError
from dnictl.options import print_json

if TYPE_CHECKING:
    from dni_runtime.launch.host import Site
    from dni_runtime.launch.plan import LaunchPlan
    from dni_runtime.launch.prepare import Prepared
    from dni_runtime.launch.records import Record
    from dni_runtime.launch.slurm.allocation import Allocation
    from dni_runtime.launch.slurm.job import JobRecord
    from dni_runtime.launch.slurm.script import JobRequest
    from dni_runtime.launch.state import RunState
    from dni_runtime.spec.profile import ProfileSpec


def up_in_allocation(
    prepared: Prepared, root: Path, site: Site, log_level: str, *, dry_run: bool, as_json: bool
) -> tuple[Record, LaunchPlan] | None:
    """``up`` where Slurm has given nodes already: the same steps as a submitted job's.

    Returns:
        The run and its plan; None for a dry run, which prints where the modules would be.

    Raises:
        UsageError: There are no nodes, or the chain cannot be placed on them.
    """
    from dni_runtime.launch.records import Record, create_run
    from dni_runtime.launch.slurm.allocation import allocation_here, plan_in_allocation
    from dni_runtime.launch.slurm.profiles import load_profile
    from dni_runtime.launch.slurm.script import placement_lines
    from dni_runtime.launch.slurm.submit import job_record
    from dni_runtime.launch.start import write_plan

    allocation = allocation_here()
    if allocation is None:
        raise UsageError(
            "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: this is no allocation",
            hint="--backend process or apptainer starts the workers on this host",
        )
    profile_name = os.environ.get("DNICTL_PROFILE")
    request = request_here(root, prepared, load_profile(profile_name), allocation)
    if dry_run and as_json:
        from dnictl.submit import placement_rows

        rows = placement_rows(request, prepared)
        print_json({"job": allocation.job, "hosts": allocation.hosts, "modules": rows})
        return None
    if dry_run:
        click.echo(f"# job {allocation.job}: {', '.join(allocation.hosts)}")
        for line in placement_lines(request):
            click.echo(line)
        return None
    run = create_run(root, prepared, backend=site.backend, images=site.images)
    job = job_record(request, profile_name, log_level, allocation.job)
    job.write(run)
    record = Record.read(run.root)
    plan = plan_in_allocation(record, job, allocation, attempt=1, site=site)
    write_plan(run, plan)
    return record, plan


def request_here(
    root: Path, prepared: Prepared, profile: ProfileSpec, allocation: Allocation
) -> JobRequest:
    """What a chain would be as a job on the nodes that there are.

    Raises:
        UsageError: It cannot be placed on them.
        SpecError: A setting of the chain does not fit them.
    """
    from dni_runtime.core.cost import estimated_costs
    from dni_runtime.launch.prepare import importing_from
    from dni_runtime.launch.slurm.submit import make_request

    if allocation.groups[0] is not None:
        raise UsageError(
            f"job {allocation.job} is heterogeneous: modules are not placed in one that is there",
            hint="'dnictl submit' asks for what the modules' partitions need",
        )
    with importing_from(prepared.base.absolute()):
        costs = estimated_costs(prepared.workers)
    wanted = prepared.chain.placement
    most = min(len(allocation.hosts), len(prepared.modules))
    return make_request(
        root,
        prepared,
        profile,
        python=sys.executable,
        nodes=most if wanted.nodes is None and wanted.strategy != "explicit" else None,
        costs=costs,
    )


def submit_again(record: Record, job: JobRecord, cut: str, *, dry_run: bool, as_json: bool) -> None:
    """``resume`` for a run of Slurm: another job with the same script.

    Raises:
        UsageError: The run was not submitted, or another checkpoint than the newest is wanted.
    """
    from dni_runtime.launch.slurm import submit

    if not record.run.script.exists():
        raise UsageError(
            f"run {record.name!r} was started by 'dnictl up' within job {job.job}: it has no "
            "batch script to submit again",
            hint=f"within an allocation: dnictl supervise {record.run.root}",
        )
    if cut != "auto":
        raise UsageError(
            "--from is for runs on one host: a job goes on from the newest checkpoint",
            hint=f"remove the newer ones from {str(record.run.checkpoints)!r}",
        )
    if dry_run:
        script = record.run.script.read_text()
        if as_json:
            print_json({"run": record.name, "path": str(record.run.root), "script": script})
        else:
            click.echo(script, nl=False)
        return
    number = submit.submit_again(record.run, job)
    if as_json:
        print_json({"run": record.name, "path": str(record.run.root), "job": number})
    else:
        click.echo(f"{record.name}: job {number}")


def plan_of_job(record: Record, job: JobRecord, state: RunState) -> LaunchPlan | None:
    """The plan for this start of a run's job, the first or a later one; None: it has finished.

    Raises:
        UsageError: This process is not in an allocation.
    """
    from dni_runtime.launch.slurm.allocation import allocation_here, plan_in_allocation
    from dni_runtime.launch.slurm.starter import end_steps
    from dni_runtime.launch.start import write_plan

    allocation = allocation_here()
    if allocation is None:
        raise UsageError(
            f"run {record.name!r} is a Slurm job's, and this is no allocation",
            hint=f"go on with it by 'dnictl resume {record.name}'",
        )
    if state.phase == "finished":
        return None
    end_steps(record.modules)  # which a supervisor that was killed has left
    plan = plan_in_allocation(record, job, allocation, attempt=state.last_attempt + 1)
    write_plan(record.run, plan)
    return plan
