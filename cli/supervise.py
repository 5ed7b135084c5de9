"""Supervision of a run to its end, and the hidden command ``supervise``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dnictl.ending import conclude
from dnictl.options import chosen_run, print_json, tell, trust_option

if TYPE_CHECKING:
    from dni_runtime.launch.start import Launch


@click.command(hidden=True)
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@trust_option
def supervise(path: Path) -> None:
    """Start and supervise the plan in a run directory, for --detach and batch scripts.

    Workers that still run without a supervisor are taken over.
    """
    run = chosen_run(str(path), path)
    launch = run.take_over()
    if launch is None:
        conclude(run, run.state(), as_json=False)
    else:
        go(launch)


def go(launch: Launch, *, detached: bool = False, as_json: bool = False) -> None:
    """Start a run in the background, or supervise it to its end and exit with its code."""
    from dni_runtime.launch.run import Run
    from dnictl.progress import progress

    run = Run.open(launch.run.root)
    if not detached:
        with progress(run, quiet=as_json) as show:
            state = launch.supervise(show)
        conclude(run, state, as_json=as_json)
    pid = launch.detach()
    if as_json:
        print_json({"run": run.name, "path": str(run.directory.root), "pid": pid})
    else:
        click.echo(run.name)
        tell(
            f"in the background; see 'dnictl status {run.name}', 'dnictl logs -f {run.name}', "
            f"'dnictl wait {run.name}'"
        )
