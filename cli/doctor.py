"""The command ``doctor``: what this machine has of what a chain may need."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UnavailableError
from dnictl.options import json_option, print_json

if TYPE_CHECKING:
    from dni_runtime.launch.doctor import Check

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "missing": ("✗", "red")}
_NEEDED = {"process": {"always"}, "apptainer": {"always", "containers"}}


@click.command()
@click.option(
    "--backend",
    type=click.Choice(["process", "apptainer"]),
    default="process",
    show_default=True,
    help="What must be there: for plain processes, or for containers too.",
)
@json_option
def doctor(backend: str, as_json: bool) -> None:
    """Look at what this machine has of what a chain may need.

    Ends with exit code 69 when something is missing that --backend needs; all else is for your
    information.

    \b
    Example:
      dnictl doctor --backend apptainer
    """
    from dni_runtime.launch.doctor import examine

    checks: list[Check] = []
    for check in examine():
        checks.append(check)
        if not as_json:
            _show(check, needed=check.need in _NEEDED[backend])
    lacking = [c.name for c in checks if c.status == "missing" and c.need in _NEEDED[backend]]
    if as_json:
        print_json(
            {"backend": backend, "ready": not lacking, "checks": [asdict(c) for c in checks]}
        )
    elif lacking:
        click.echo(f"\nthe {backend} backend cannot be used here: {', '.join(lacking)} missing")
    else:
        click.echo(f"\nready for the {backend} backend")
    if lacking:
        sys.exit(UnavailableError.exit_code)


def _show(check: Check, *, needed: bool) -> None:
    mark, colour = _MARKS[check.status]
    if check.status == "missing" and not needed:
        mark, colour = "-", "bright_black"
    note = {"containers": " (for containers)", "builds": " (for builds)"}.get(check.need, "")
    click.echo(f"{click.style(mark, fg=colour)} {check.name:17} {check.detail}{note}")
    if check.hint is not None and check.status != "ok":
        click.echo(f"  {'':17} → {check.hint}")
