"""Commands ``restart`` and ``events``: starting a module again, and what has happened in a run."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import click

from dni_runtime.errors import UsageError
from dnictl.options import (
    check_module,
    chosen_run,
    json_option,
    pause,
    print_json,
    run_argument,
    runs_option,
)

_POLL_S = 0.1
_BEGINS_S = 60.0  # the supervisor looks once a second, a shared file system shows files later


@click.command()
@click.argument("module")
@run_argument
@runs_option
@json_option
def restart(module: str, run: str | None, runs: Path, as_json: bool) -> None:
    """Start a module of a run again.

    It leaves after a checkpoint, and its next attempt goes on from there. The other modules go on
    meanwhile.

    \b
    Example:
      dnictl restart lower
    """
    from dni_runtime.launch.slurm.job import read_state
    from dni_runtime.rundir import write_json

    record = chosen_run(run, runs)
    check_module(record, module)
    state = read_state(record.run)
    if state.phase not in ("starting", "running", "stalled"):
        done = state.phase in ("queued", "stopping", "finished")
        raise UsageError(
            f"run {record.name!r} is {state.phase}: there is nobody to start a module again",
            hint=f"see 'dnictl status {record.name}'"
            if done
            else f"go on with the run by 'dnictl resume {record.name}'",
        )
    known = state.modules.get(module)
    if known is not None and known.state == "finished":
        raise UsageError(
            f"module {module!r} has finished: there is nothing to start again",
            hint=f"see 'dnictl status {record.name}'",
        )
    request = record.run.restart_request(module)
    write_json(request, {"time": time.time()})
    until = time.monotonic() + _BEGINS_S
    while request.exists():
        if time.monotonic() >= until:
            request.unlink(missing_ok=True)
            raise UsageError(
                f"the supervisor of run {record.name!r}, process {state.pid} on {state.host}, "
                "does not answer",
                hint=f"see 'dnictl status {record.name}'",
            )
        time.sleep(_POLL_S)
    if as_json:
        print_json({"run": record.name, "module": module})
    else:
        click.echo(f"{record.name}: {module} is started again after a checkpoint")


@click.command()
@run_argument
@runs_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N events.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def events(run: str | None, runs: Path, follow: bool, tail: int | None, as_json: bool) -> None:
    """Print what has happened in a run.

    Starts, ends and restarts of workers, and why.

    \b
    Example:
      dnictl events -f
    """
    from dni_runtime.launch.slurm.job import read_state
    from dni_runtime.lines import LineReader, offset_of_last

    record = chosen_run(run, runs)
    path = record.run.events
    reader = LineReader(path, offset=0 if tail is None else offset_of_last(path, tail))
    limit = tail
    while True:
        # The state first: what was written before the end is seen after it.
        state = read_state(record.run)
        new = reader.new()
        if limit is not None:
            new, limit = iter(deque(new, maxlen=limit)), None
        for event in new:
            click.echo(json.dumps(event, ensure_ascii=False) if as_json else _line(event))
        if not follow or not state.active:
            return
        pause(state)


def _line(event: dict[str, Any]) -> str:
    hidden = ("time", "event", "module")
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0)))
    rest = [f"{k}={v}" for k, v in event.items() if k not in hidden and v is not None]
    return "  ".join([stamp, str(event.get("event")), str(event.get("module", "-")), *rest])
