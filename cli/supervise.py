"""Watching a run to its end; the hidden command ``supervise``."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import click

from dnictl.ending import conclude
from dnictl.options import print_json

if TYPE_CHECKING:
    from dni_runtime.launch.lease import Lease
    from dni_runtime.launch.plan import LaunchPlan
    from dni_runtime.launch.records import Record
    from dni_runtime.launch.state import RunState


@click.command(hidden=True)
@click.argument("run", type=click.Path(path_type=Path))
def supervise(run: Path) -> None:
    """Start the plan in a run directory and watch it: what --detach and batch scripts run.

    Workers that go on without a supervisor are watched from here on.
    """
    from dni_runtime.launch.records import Record
    from dni_runtime.launch.slurm.job import JobRecord
    from dni_runtime.launch.start import planned, take
    from dni_runtime.launch.state import RunState

    record = Record.read(run)
    lease = take(record.run)
    job = JobRecord.read(record.run)
    state = RunState.read(record.run)
    adopt = state if state.phase == "unsupervised" and state.host == gethostname() else None
    if job is None or adopt is not None:
        plan: LaunchPlan | None = planned(record.run)
    else:
        from dnictl.allocation import plan_of_job

        plan = plan_of_job(record, job, state)
    if plan is None:
        conclude(record, as_json=False)
    else:
        watch(record, plan, lease, quiet=False, adopt=adopt)


def go(record: Record, plan: LaunchPlan, lease: Lease, *, detached: bool, as_json: bool) -> None:
    if not detached:
        watch(record, plan, lease, quiet=as_json, as_json=as_json)
        return
    from dni_runtime.launch.start import detach

    pid = detach(record.run, lease)
    if as_json:
        print_json({"run": record.name, "path": str(record.run.root), "pid": pid})
    else:
        click.echo(record.name)
        click.echo(
            f"in the background; see 'dnictl status {record.name}', 'dnictl logs -f "
            f"{record.name}', 'dnictl wait {record.name}'",
            err=True,
        )


def watch(
    record: Record,
    plan: LaunchPlan,
    lease: Lease,
    *,
    quiet: bool,
    as_json: bool = False,
    adopt: RunState | None = None,
) -> None:
    from dni_runtime.launch.start import supervisor_of
    from dnictl.progress import progress

    supervisor = supervisor_of(record.run, plan, lease, adopt=adopt)
    try:
        with progress(record, quiet=quiet) as show:
            supervisor.run(show)
    finally:
        if plan.workers[0].node is not None:
            from dni_runtime.launch.interrupts import catching_signals
            from dni_runtime.launch.slurm.allocation import clean_up

            with catching_signals(lambda number: None):  # how the run ended is known by now
                clean_up(plan)
    conclude(record, as_json=as_json)
