"""How a run ended: its last line, its error, and the command's exit code."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, NoReturn

import click

from dni_runtime.errors import StoppedError
from dnictl.options import print_json

if TYPE_CHECKING:
    from dni_runtime.documents.state import RunState
    from dni_runtime.launch.figures import RunFigures
    from dni_runtime.launch.run import Run


def conclude(run: Run, state: RunState, *, as_json: bool) -> NoReturn:
    """Print how a run ended, and exit with the run's exit code.

    ``state`` is its end as the caller has seen it: files may not have had room for it.
    """
    figures = run.status(state)
    with contextlib.suppress(OSError):  # the reader is gone, or the log's disk is full
        if as_json:
            print_json(figures.model_dump())
        else:
            click.echo(summary(figures))
        if state.phase == "stopped":
            click.echo(f"  → dnictl resume {run.name}", err=True)
    error = run.failure(state)
    if error is not None:
        raise error
    sys.exit(0 if state.phase == "finished" else state.exit_code or StoppedError.exit_code)


def summary(figures: RunFigures) -> str:
    """Return one line on a run that has ended."""
    from dnictl.show import chain_line, duration

    took = ""
    if figures.started is not None:
        took = f" after {duration((figures.ended or time.time()) - figures.started)}"
    return f"{figures.run}: {figures.state}{took}, {chain_line(figures)}"
