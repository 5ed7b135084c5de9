"""Commands that start workers: ``up``, ``run``, ``resume``."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dni_runtime.errors import UsageError
from dnictl.ending import conclude
from dnictl.options import (
    Wanted,
    backend_option,
    chain_argument,
    chosen_run,
    data_option,
    detach_option,
    dry_run_option,
    images_option,
    json_option,
    level_option,
    print_json,
    run_argument,
    run_dir_option,
    runs_option,
)
from dnictl.supervise import go

if TYPE_CHECKING:
    from dni_runtime.launch.host import Site
    from dni_runtime.launch.plan import LaunchPlan
    from dni_runtime.launch.prepare import Prepared
    from dni_runtime.launch.records import Record


@click.command()
@chain_argument
@backend_option
@detach_option
@run_dir_option
@runs_option
@images_option
@data_option
@level_option
@dry_run_option
@json_option
def up(
    chain: Path,
    backend: Wanted,
    detach: bool,
    run_dir: Path | None,
    runs: Path,
    images: Path,
    data: Path | None,
    log_level: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train a chain here.

    One worker per module is started, and watched to the end.
    Ctrl-C stops the run after a checkpoint (exit code 75; 'dnictl resume' goes on), a second one
    kills it. Inside a Slurm allocation the workers are steps on its nodes, unless --backend says
    otherwise.

    \b
    Example:
      dnictl up chain.yaml
      dnictl up chain.yaml -d && dnictl logs -f
    """
    from dni_runtime.launch.prepare import prepare
    from dni_runtime.launch.records import Record, create_run, new_run_id
    from dni_runtime.launch.start import plan_here, take, write_plan

    prepared = prepare(chain, data=data)
    root = (run_dir or runs / new_run_id(prepared.chain.name)).absolute()
    if backend == "auto" and "SLURM_JOB_ID" in os.environ:
        from dnictl.allocation import up_in_allocation

        site = site_for(prepared, "auto", images, elsewhere=True)
        started = up_in_allocation(
            prepared, root, site, log_level, dry_run=dry_run, as_json=as_json
        )
        if started is not None:
            record, plan = started
            go(record, plan, take(record.run), detached=detach, as_json=as_json)
        return
    site = site_for(prepared, backend, images)
    plan = plan_here(
        root, prepared.chain, prepared.workers, site, data=prepared.data, log_level=log_level
    )
    if dry_run:
        _print_plan(plan, as_json)
        return
    run = create_run(root, prepared, backend=site.backend, images=site.images)
    lease = take(run)
    write_plan(run, plan)
    go(Record.read(run.root), plan, lease, detached=detach, as_json=as_json)


@click.command()
@run_argument
@runs_option
@detach_option
@click.option(
    "--from",
    "cut",
    default="auto",
    metavar="CUT",
    help="Stream position of the checkpoint to go on from (default: the newest).",
)
@level_option
@dry_run_option
@json_option
def resume(
    run: str | None,
    runs: Path,
    detach: bool,
    cut: str,
    log_level: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Go on with a run that was stopped or failed.

    It begins with the newest complete checkpoint. A Slurm job's script is submitted again.

    \b
    Example:
      dnictl resume
    """
    from dni_runtime.cuts import newest_cut
    from dni_runtime.launch.slurm.job import JobRecord, read_state
    from dni_runtime.launch.start import end_leftovers, plan_here, site_again, take, write_plan

    record = chosen_run(run, runs)
    job = JobRecord.read(record.run)
    state = read_state(record.run)
    if state.active and (state.phase != "unsupervised" or job is not None):
        raise UsageError(
            f"run {record.name!r} is {state.phase}", hint=f"stop it first: dnictl stop {run or ''}"
        )
    if state.phase == "finished":
        raise UsageError(
            f"run {record.name!r} has finished",
            hint=f"take its model home: dnictl export {record.name} -o model.safetensors",
        )
    if notice := record.compare_versions():
        click.echo(f"{record.name}: {notice}", err=True)
    if job is not None:
        from dnictl.allocation import submit_again

        source = click.get_current_context().get_parameter_source("log_level")
        level = job.log_level if source is ParameterSource.DEFAULT else log_level
        submit_again(record, replace(job, log_level=level), cut, dry_run=dry_run, as_json=as_json)
        return
    chain, workers = record.specs()
    _check_cut(record, cut)
    lease = None
    if not dry_run:
        lease = take(record.run)
        state = read_state(record.run)  # as it was left
        if state.phase == "unsupervised":
            click.echo(f"{record.name}: stopping the workers that go on by themselves", err=True)
        state = end_leftovers(record.run, state, chain.stop_grace_s)
        _check_cut(record, cut)  # those workers may have removed it
        record.run.stop_request.unlink(missing_ok=True)
        if state.phase == "finished":
            conclude(record, as_json=as_json)
    if cut == "auto" and not newest_cut(record.run, record.modules)[0]:
        click.echo(f"{record.name}: no complete checkpoint, so it starts from scratch", err=True)
    site = site_again(record)
    plan = plan_here(
        record.run.root,
        chain,
        workers,
        site,
        data=record.data,
        attempt=state.last_attempt + 1,
        resume=cut,
        log_level=log_level,
    )
    if lease is None:
        _print_plan(plan, as_json)
        return
    write_plan(record.run, plan)
    go(record, plan, lease, detached=detach, as_json=as_json)


def _check_cut(record: Record, cut: str) -> None:
    """Refuse a checkpoint that is not there, or damaged, before anything newer goes."""
    from dni_runtime.cuts import complete_cuts, verify, written_cuts

    if cut == "auto":
        return
    if not cut.isdecimal() or int(cut) not in written_cuts(record.run, record.modules):
        there = ", ".join(map(str, complete_cuts(record.run, record.modules))) or "none"
        raise UsageError(f"there is no complete checkpoint {cut!r}; there are: {there}")
    verify(record.run, int(cut), record.modules)


@click.command("run")
@click.argument("module")
@click.option(
    "-f", "--file", "chain", type=click.Path(path_type=Path), default=Path("chain.yaml"),
    show_default=True, help="The chain file.",
)  # fmt: skip
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="The run's directory, the same for all modules; made where it is missing.",
)
@backend_option
@images_option
@data_option
@click.option(
    "--resume", "cut", default="auto", show_default=True, metavar="auto|own|none|CUT",
    help="What to begin with: the newest complete checkpoint, the module's own newest state, "
    "nothing, or the checkpoint at this position of the stream.",
)  # fmt: skip
@level_option
@dry_run_option
def run(
    module: str,
    chain: Path,
    run_dir: Path,
    backend: Wanted,
    images: Path,
    data: Path | None,
    cut: str,
    log_level: str,
    dry_run: bool,
) -> None:
    """Serve one module in the foreground.

    Its neighbours are started the same way.

    \b
    Example, in two terminals:
      dnictl run bottom --run-dir runs/by-hand
      dnictl run top --run-dir runs/by-hand
    """
    from dni_runtime.image.apptainer import host_environment
    from dni_runtime.launch.prepare import prepare
    from dni_runtime.launch.records import create_run
    from dni_runtime.launch.start import plan_here
    from dni_runtime.rundir import RunDir, socket_folder

    prepared = prepare(chain, data=data)
    if module not in prepared.modules:
        raise UsageError(
            f"chain {prepared.chain.name!r} has no module {module!r}",
            hint=f"its modules: {', '.join(prepared.modules)}",
        )
    if cut not in ("auto", "own", "none") and not cut.isdecimal():
        raise UsageError(
            f"--resume {cut!r}: there is no such checkpoint",
            hint="allowed: auto, own, none, or the number of one in 'checkpoints/' of the run",
        )
    site = site_for(prepared, backend, images)
    plan = plan_here(
        run_dir,
        prepared.chain,
        prepared.workers,
        site,
        data=prepared.data,
        resume=cut,
        log_level=log_level,
        supervised=False,
    )
    (worker,) = (one for one in plan.workers if one.module == module)
    if dry_run:
        click.echo(shlex.join(worker.argv))
        return
    if RunDir(run_dir).record.exists():
        _same_spec(prepared, run_dir, module)
    else:
        create_run(run_dir, prepared, backend=site.backend, images=site.images)
    socket_folder(run_dir.absolute())
    environ = host_environment(os.environ) if site.backend == "apptainer" else dict(os.environ)
    sys.stdout.flush()
    os.execvpe(worker.argv[0], worker.argv, {**environ, **worker.environment})


def _same_spec(prepared: Prepared, run_dir: Path, module: str) -> None:
    from dni_runtime.launch.records import Record

    record = Record.read(run_dir)
    hashes = {worker.module: worker.hash for worker in prepared.workers}
    if {worker.module: worker.hash for worker in record.specs()[1]} != hashes:
        raise UsageError(
            f"{str(run_dir)!r} is a run of another version of chain {record.chain!r}",
            hint="name another --run-dir",
        )


def site_for(
    prepared: Prepared,
    backend: Wanted,
    images: Path,
    *,
    elsewhere: bool = False,
    interface: str | None = None,
) -> Site:
    """What the host, or a cluster that shares its files and names an interface, offers a chain."""
    from dni_runtime.launch.host import check_host, exposure

    warning = exposure(prepared.chain.links, interface)
    if warning is not None:
        click.secho(f"warning: {warning}", err=True, fg="yellow")
    site = check_host(
        prepared.written,
        prepared.workers,
        wanted=backend,
        images=images,
        data=prepared.data,
        place=prepared.place,
        elsewhere=elsewhere,
    )
    if site.notice is not None:
        click.echo(f"dnictl: {site.notice}", err=True)
    return site


def _print_plan(plan: LaunchPlan, as_json: bool) -> None:
    if as_json:
        print_json(plan.to_json())
        return
    click.echo(f"# run {plan.run}, backend {plan.backend}")
    for worker in plan.workers:
        click.echo(f"\n# {worker.module}: log {worker.log}")
        for name, value in worker.environment.items():
            click.echo(f"{name}={shlex.quote(value)} \\")
        click.echo(shlex.join(worker.argv))
