"""``dnictl tensorboard``: a run's metrics for TensorBoard."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from dnictl.options import (
    FOLDER,
    chosen_run,
    json_option,
    print_json,
    run_argument,
    runs_option,
    trust_option,
)

_POLL_S = 2.0


@click.command()
@run_argument
@runs_option
@click.option(
    "--logdir", type=FOLDER,
    help="Write below DIRECTORY/RUN instead of the run's own folder.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Follow until the run has ended.")
@trust_option
@json_option
def tensorboard(
    run: str | None, runs: Path, logdir: Path | None, follow: bool, as_json: bool
) -> None:
    """Write a run's metrics for TensorBoard.

    Writes event files, one folder per module. It adds only what is new, so run it at any time,
    during training or later, but one at a time. Needs the package tensorboard:
    pip install 'dni-runtime[tensorboard]'.

    \b
    Example:
      dnictl tensorboard --follow &
      tensorboard --logdir runs
    """
    from dni_runtime.measure.tensorboard import Board, only_writer

    its = chosen_run(run, runs)
    folder = its.directory.tensorboard if logdir is None else logdir / its.name
    if logdir is None:  # it writes into the run
        its.check_trusted()
    board = Board(its.record, folder)
    events: Counter[str] = Counter()
    with only_writer(folder):
        for _ in its.states(_POLL_S):
            events.update(board.update())
            if not follow:
                break
    if as_json:
        print_json({"run": its.name, "logdir": str(board.folder), "events": events})
        return
    click.echo(f"{board.folder}: {sum(events.values())} new events of {len(events)} modules")
    click.echo(f"  → tensorboard --logdir {board.folder}", err=True)
