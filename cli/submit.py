"""Commands around Slurm: ``submit``, ``plan``, ``profile``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UnavailableError, UsageError
from dnictl import options
from dnictl.show import Column, percent, print_table, quantity
from dnictl.terminal import answer, answered, json_wanted, tell

if TYPE_CHECKING:
    from dni_runtime.plan.prepare import CheckedChain
    from dni_runtime.schedulers.slurm.script import JobRequest
    from dni_runtime.spec.profile import ProfileSpec

nodes_option = click.option(
    "--nodes", type=click.IntRange(1, 1024), metavar="N", help="Nodes (default: the chain's)."
)
costs_option = click.option(
    "--costs", type=options.FILE, metavar="FILE",
    help="Output of 'dnictl bench module --json' to balance by (default: an estimate).",
)  # fmt: skip


@click.command()
@options.of_new_run
@options.profile
@nodes_option
@options.of_job
@costs_option
@click.option("--dependency", metavar="LIST", help="Start after other jobs, as for sbatch.")
@click.option("--wait", "wait_for_it", is_flag=True,
              help="Wait for the end; the exit code is the run's.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the batch script; submit and write nothing.")
@click.option("--test-only", is_flag=True, help="Let Slurm check the job; submit nothing.")
@click.option("--parsable", is_flag=True, help="Print run and job id only: RUN;JOB.")
@options.carry
@options.changes
@options.trust
@options.json
def submit(
    chain: Path,
    profile: str | None,
    nodes: int | None,
    costs: Path | None,
    dependency: str | None,
    wait_for_it: bool,
    dry_run: bool,
    test_only: bool,
    parsable: bool,
    **values: Any,
) -> None:
    """Train a chain on a Slurm cluster.

    Submits one job, with a step for each module.
    Run directory, data, images and this Python must lie on a file system that the nodes share.

    \b
    Example:
      dnictl submit chain.yaml --nodes 2 --time 1:00:00 --profile mycluster
      dnictl submit chain.yaml --dry-run      # where modules go, and the batch script
    """
    if parsable and json_wanted():
        raise UsageError("--parsable and --json exclude each other", hint="give one of them")
    from dni_runtime.schedulers.slurm.submit import job_record, placement_rows, submit_run

    site_profile = options.chosen_profile(profile)
    prepared, settings = options.new_run(chain, **values)
    request = job_request(
        settings.run, prepared, site_profile, nodes=nodes, costs=costs, strict=not dry_run
    )
    job = job_record(request, profile, settings.log_level)
    site = options.site_for(prepared, replace(settings, scheduler="slurm", job=job))
    further = [] if dependency is None else [f"--dependency={dependency}"]
    if dry_run or test_only:
        from dni_runtime.schedulers.slurm.script import render_script

        script = render_script(request)
        said = _checked(script, further) if test_only else None
        document = {"script": script, "modules": placement_rows(request, prepared), "slurm": said}
        answer(document, script.removesuffix("\n") if said is None else said)
        return
    record, number = submit_run(request, prepared, site, job, further)
    document = {"run": record.name, "path": str(record.run.root), "job": number}
    if parsable:
        click.echo(f"{record.name};{number}")
    elif not (json_wanted() if wait_for_it else answered(document)):
        click.echo(record.name)
        click.echo(
            f"job {number}; see 'dnictl status {record.name}', 'dnictl logs -f {record.name}', "
            f"'dnictl wait {record.name}'",
            err=True,
        )
    if wait_for_it:
        from dni_runtime.api.run import Run
        from dnictl.runs import conclude

        run = Run(record)
        conclude(run, run.wait(), beside=parsable)


@click.command()
@options.chain
@options.profile
@nodes_option
@options.partition
@costs_option
@options.data
@options.json
def plan(
    chain: Path, profile: str | None, nodes: int | None, costs: Path | None, data: Path | None
) -> None:
    """Show which node of a job each module would be on.

    \b
    Example:
      dnictl plan chain.yaml --nodes 2
      dnictl bench module --json > costs.json && dnictl plan --nodes 2 --costs costs.json
    """
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.schedulers.slurm.submit import placement_rows

    site_profile = options.chosen_profile(profile)
    prepared = prepare(chain, data=data)
    request = job_request(
        Path("RUN").absolute(), prepared, site_profile, nodes=nodes, costs=costs, strict=False
    )
    rows = placement_rows(request, prepared)
    if not answered(rows):
        _print_rows(rows)


@click.group()
def profile() -> None:
    """Site profiles: the settings of a cluster for all jobs."""


@profile.command("list")
@options.json
def list_profiles() -> None:
    """List the site profiles and their files.

    \b
    Example:
      dnictl profile list
    """
    from dni_runtime.schedulers.slurm.profiles import profile_files

    profiles = profile_files()
    columns: list[Column[tuple[str, Path]]] = [
        Column("profile", lambda item: item[0]),
        Column("file", lambda item: item[1]),
    ]
    if not answered({name: str(path) for name, path in profiles.items()}):
        print_table(columns, profiles.items())


@profile.command("show")
@click.argument("name", shell_complete=options.complete_profiles)
def show_profile(name: str) -> None:
    """Print a site profile's file, after checking it.

    \b
    Example:
      dnictl profile show example > ~/.config/dnictl/profiles/mycluster.yaml
    """
    from dni_runtime.schedulers.slurm.profiles import load_profile, profile_files

    load_profile(name)
    click.echo(profile_files()[name].read_text(encoding="utf-8"), nl=False)


def job_request(
    root: Path,
    prepared: CheckedChain,
    site_profile: ProfileSpec,
    *,
    nodes: int | None,
    costs: Path | None,
    strict: bool,
) -> JobRequest:
    """Plan a job; ``strict`` refuses one where Slurm does not say what its nodes have."""
    from dni_runtime.plan.prepare import importing_from
    from dni_runtime.resolve.cost import estimated_costs
    from dni_runtime.schedulers.slurm.commands import NodeShape, node_shapes
    from dni_runtime.schedulers.slurm.submit import make_request, measured_costs

    shapes: list[NodeShape] | None = None
    try:
        shapes = node_shapes(site_profile.partition)
    except UnavailableError as error:
        if strict:
            raise
        click.echo(f"dnictl: {error.message}: the nodes are not known here", err=True)
    if costs is not None:
        module_costs = measured_costs(costs, prepared.modules)
    else:
        with importing_from(prepared.base.absolute()):
            module_costs = estimated_costs(prepared.workers)
    request = make_request(
        root, prepared, site_profile, python=sys.executable,
        python_path=os.environ.get("PYTHONPATH", ""), nodes=nodes, costs=module_costs,
        shapes=shapes,
    )  # fmt: skip
    if request.idle_gpus:
        tell(
            f"all nodes of a job are alike: it gets {request.largest('gpus')} GPUs on each of "
            f"{request.count} nodes, {request.idle_gpus} of them unused, which may be charged; "
            "'placement' can bring modules with GPUs together, or spread them evenly"
        )
    return request


def _checked(script: str, further: list[str]) -> str:
    """Let Slurm check a batch script, and return its answer."""
    import tempfile

    from dni_runtime.schedulers.slurm.commands import check_only

    with tempfile.NamedTemporaryFile("w", prefix="dnictl-", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        return check_only(Path(file.name), further)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    columns: list[Column[dict[str, Any]]] = [
        Column("module"),
        quantity("node"),
        Column("input"),
        quantity("cpus"),
        quantity("gpus"),
        quantity("memory_mib", text="{} MiB".format, title="memory"),
        quantity("work", text=partial(percent, digits=0)),
    ]
    print_table(columns, rows)
    for node in sorted({row["node"] for row in rows}):
        share = sum(row["work"] for row in rows if row["node"] == node)
        names = ", ".join(row["module"] for row in rows if row["node"] == node)
        click.echo(f"node {node}: {percent(share, 0)} of the work ({names})", err=True)
