"""Command ``scale``: how many replicas of a module take batches."""

from __future__ import annotations

from pathlib import Path

import click

from dni_runtime.errors import UsageError
from dnictl.options import chosen_run, json_option, print_json, runs_option


@click.command()
@click.argument("changes", nargs=-1, required=True, metavar="MODULE=N... [RUN]")
@runs_option
@json_option
def scale(changes: tuple[str, ...], runs: Path, as_json: bool) -> None:
    """Change how many replicas of a module take batches, while the run goes on.

    For modules with 'replicas: {start: .., most: ..}'. Nobody restarts: a new replica takes its
    weights from one that runs, and one that leaves shares what it has learnt before it exits.

    \b
    Examples:
      dnictl scale middle=3
      dnictl scale middle=1 upper=2 digits-20250101-120000
    """
    given = [one.partition("=") for one in changes if "=" in one]
    names = [one for one in changes if "=" not in one]
    wrong = [f"{name}={count}" for name, _, count in given if not (name and count.isdecimal())]
    if wrong or not given or len(names) > 1:
        raise UsageError(
            f"{wrong[0]!r} is not MODULE=N" if wrong else f"{' '.join(changes)!r} is not clear",
            hint="for example: dnictl scale middle=3",
        )
    its = chosen_run(names[0] if names else None, runs)
    wanted = its.scale({name: int(count) for name, _, count in given})
    if as_json:
        print_json({"run": its.name, "replicas": wanted})
    else:
        shown = ", ".join(f"{name}: {count}" for name, count in wanted.items())
        click.echo(f"{its.name}: replicas wanted: {shown}")
