"""``up`` within a Slurm allocation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UsageError
from dnictl.options import print_json

if TYPE_CHECKING:
    from dni_runtime.launch.host import Site
    from dni_runtime.launch.prepare import Prepared
    from dni_runtime.launch.start import Launch


def up_in_allocation(
    prepared: Prepared, root: Path, site: Site, log_level: str, *, dry_run: bool, as_json: bool
) -> Launch | None:
    """Plan ``up`` on the nodes of an allocation, with the same steps as a submitted job.

    A dry run prints the placement, and returns None.
    """
    from dni_runtime.launch.planning import plan_here
    from dni_runtime.launch.records import create_run
    from dni_runtime.launch.slurm.allocation import OUTSIDE, allocation_here, request_here
    from dni_runtime.launch.slurm.profiles import load_profile
    from dni_runtime.launch.slurm.script import placement_lines
    from dni_runtime.launch.slurm.submit import job_record, placement_rows
    from dni_runtime.launch.start import Launch

    allocation = allocation_here()
    if allocation is None:
        raise UsageError(
            "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: this is not an allocation",
            hint=OUTSIDE,
        )
    profile_name = os.environ.get("DNICTL_PROFILE")
    request = request_here(root, prepared, load_profile(profile_name), allocation)
    if dry_run and as_json:
        rows = placement_rows(request, prepared)
        print_json({"job": allocation.job, "hosts": allocation.hosts, "modules": rows})
        return None
    if dry_run:
        click.echo(f"# job {allocation.job}: {', '.join(allocation.hosts)}")
        for line in placement_lines(request):
            click.echo(line)
        return None
    run = create_run(root, prepared, backend=site.backend, images=site.images, scheduler="slurm")
    job_record(request, profile_name, log_level, allocation.job).write(run.job)
    plan = plan_here(
        root, prepared.chain, prepared.workers, site, data=prepared.data, scheduler="slurm"
    )
    return Launch.of(run, plan)
