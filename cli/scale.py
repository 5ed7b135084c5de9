"""Command ``scale``: how many replicas of a module take batches."""

from __future__ import annotations

from pathlib import Path

import click

from dni_runtime.errors import UsageError
from dnictl.options import chosen_run, json_option, print_json, runs_option, trust_option

AUTO = "auto"


@click.command()
@click.argument("changes", nargs=-1, required=True, metavar="MODULE=N...|auto [RUN]")
@runs_option
@trust_option
@json_option
def scale(changes: tuple[str, ...], runs: Path, as_json: bool) -> None:
    """Change how many replicas a module of an active run has.

    For modules with 'replicas: {start: .., most: ..}'. All modules stop at a common checkpoint and
    start from it with the new numbers.

    'auto': as many as balance the chain, by how long a batch takes where the workers run.

    \b
    Examples:
      dnictl scale middle=3
      dnictl scale middle=1 upper=2 digits-20250101-120000
      dnictl scale auto
    """
    auto = changes[0] == AUTO
    given = [one.partition("=") for one in changes if "=" in one]
    names = [one for one in changes[auto:] if "=" not in one]
    wrong = [f"{name}={count}" for name, _, count in given if not (name and count.isdecimal())]
    if wrong or bool(given) == auto or len(names) > 1:
        raise UsageError(
            f"{wrong[0]!r} is not MODULE=N"
            if wrong
            else f"{' '.join(changes)!r}: give MODULE=N or 'auto', and at most one run",
            hint="for example: dnictl scale middle=3, or: dnictl scale auto",
        )
    its = chosen_run(names[0] if names else None, runs)
    counts = {name: int(count) for name, _, count in given}
    wanted = its.scale(its.balancing_replicas() if auto else counts, balanced=auto)
    if as_json:
        print_json({"run": its.name, "replicas": wanted})
    else:
        shown = ", ".join(f"{name}: {count}" for name, count in wanted.items())
        click.echo(f"{its.name}: replicas wanted: {shown}")
