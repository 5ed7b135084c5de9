"""Commands ``restart`` (one module) and ``events`` (the history of a run)."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dnictl.options import (
    chosen_run,
    json_option,
    print_json,
    run_argument,
    runs_option,
    trust_option,
)
from dnictl.show import printable

if TYPE_CHECKING:
    from dni_runtime.documents.events import Event


@click.command()
@click.argument("module")
@run_argument
@runs_option
@trust_option
@json_option
def restart(module: str, run: str | None, runs: Path, as_json: bool) -> None:
    """Restart one module of a run.

    It stops after a checkpoint and resumes from there. The other modules keep training.

    \b
    Example:
      dnictl restart lower
    """
    its = chosen_run(run, runs)
    its.restart(module)
    if as_json:
        print_json({"run": its.name, "module": module})
    else:
        click.echo(f"{its.name}: {module} restarts after a checkpoint")


@click.command()
@run_argument
@runs_option
@click.option("-f", "--follow", is_flag=True, help="Follow until the run has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N events.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def events(run: str | None, runs: Path, follow: bool, tail: int | None, as_json: bool) -> None:
    """Print what has happened in a run.

    Starts, ends and restarts of workers, and why.

    \b
    Example:
      dnictl events -f
    """
    from dni_runtime.documents.events import Event
    from dni_runtime.lines import LineReader, offset_of_last

    its = chosen_run(run, runs)
    path = its.directory.events
    reader = LineReader(path, Event.parse, offset=0 if tail is None else offset_of_last(path, tail))
    limit = tail
    for _ in its.states():  # the state first, to miss nothing that is written before the end
        new = reader.new()
        if limit is not None:
            new, limit = iter(deque(new, maxlen=limit)), None
        for event in new:
            click.echo(json.dumps(event.to_dict(), ensure_ascii=False) if as_json else _line(event))
        if not follow:
            return


def _line(event: Event) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    hidden = ("time", "event", "module")
    rest = [f"{k}={v}" for k, v in event.to_dict().items() if k not in hidden and v is not None]
    return printable("  ".join([stamp, event.event, event.module or "-", *rest]))
