"""How a run ended: its last line, its error, and the command's exit code."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NoReturn

import click

from dnictl.options import print_json

if TYPE_CHECKING:
    from dni_runtime.launch.figures import RunFigures
    from dni_runtime.launch.run import Run


def conclude(run: Run, *, as_json: bool) -> NoReturn:
    """Print how a run ended, and exit with the run's exit code."""
    state = run.state()
    figures = run.status(state)
    if as_json:
        print_json(figures.model_dump())
    else:
        click.echo(summary(figures))
    error = run.failure(state)
    if error is not None:
        raise error
    if state.phase == "stopped":
        click.echo(f"  → dnictl resume {run.name}", err=True)
    sys.exit(state.exit_code or 0)


def summary(figures: RunFigures) -> str:
    """Return one line on a run that has ended."""
    from dnictl.show import chain_line, duration

    took = ""
    if figures.started is not None:
        took = f" after {duration((figures.ended or time.time()) - figures.started)}"
    return f"{figures.run}: {figures.state}{took}, {chain_line(figures)}"
