"""Commands that remove runs: ``rm``, ``prune``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.show import megabytes
from dnictl.terminal import answered, tell

if TYPE_CHECKING:
    from dni_runtime.run.record import Record

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.command()
@click.argument(
    "names", nargs=-1, required=True, metavar="RUN...", shell_complete=options.complete_runs
)
@options.runs
@yes_option
@options.json
def rm(names: tuple[str, ...], runs: Path, yes: bool) -> None:
    """Remove runs with all that is in their directories.

    Only your own ones that are not active. Take a model home before: dnictl export.

    \b
    Example:
      dnictl rm digits-20250101-120000
    """
    from dni_runtime.run.record import find_run

    records = {record.run.root: record for record in (find_run(name, runs) for name in names)}
    _remove(list(records.values()), yes=yes)


@click.command()
@options.runs
@click.option("--keep", type=click.IntRange(0), required=True, metavar="N",
              help="How many of them stay, the newest.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@yes_option
@options.json
def prune(runs: Path, keep: int, dry_run: bool, yes: bool) -> None:
    """Remove old runs of yours that have finished or are lost.

    Runs that can go on (stopped, failed) stay, and those of others.

    \b
    Example:
      dnictl prune --keep 10 --dry-run
    """
    from dni_runtime.api.run import runs_in
    from dni_runtime.plan.settings import UNSUPERVISED

    over = [
        run.record
        for run, state in runs_in(runs)
        # A lost run without a supervisor may only be silent: on other hosts, or a full disk.
        if state.phase in ("finished", *(() if run.record.scheduler in UNSUPERVISED else ("lost",)))
        and run.record.is_callers
        and not run.record.run.root.is_symlink()
    ]
    _remove(over[: max(len(over) - keep, 0)], yes=yes, dry_run=dry_run)


def _remove(records: Sequence[Record], *, yes: bool, dry_run: bool = False) -> None:
    from dni_runtime.schedulers.schedulers import read_state
    from dni_runtime.supervise.removal import bytes_in, check_removable, remove_run

    for record in records:  # before the first one is removed
        check_removable(record, read_state(record.run))
    names = [record.run.root.name for record in records]  # a copy's record has another name
    nbytes = bytes_in([record.run.root for record in records])
    listed, total = ", ".join(names), megabytes(nbytes, 1)
    wanted = not dry_run
    if records and not (yes or dry_run):
        if not sys.stdin.isatty():
            raise UsageError(f"{listed}: {total} would be removed", hint="--yes removes them")
        wanted = click.confirm(f"remove {listed} ({total})?", err=True)
    if wanted:
        for record in records:
            remove_run(record)
    if answered({"runs": names, "bytes": nbytes, "removed": wanted}):
        return
    if not (wanted or dry_run):
        tell("nothing was removed")
        return
    for name in names:
        click.echo(name)
    tell(f"{'would remove' if dry_run else 'removed'} {total}" if records else "no such runs")
