"""``dnictl tensorboard``: a run's metrics for TensorBoard."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dnictl import options
from dnictl.terminal import answered, say, tell

if TYPE_CHECKING:
    from dni_runtime.api.run import Run

_POLL_S = 2.0


@click.command()
@options.of_run
@click.option(
    "--logdir", type=options.FOLDER,
    help="Write below DIRECTORY/RUN instead of the run's own folder.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Follow until the run has ended.")
@options.trust
@options.json
def tensorboard(run: Run, logdir: Path | None, follow: bool) -> None:
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

    folder = run.directory.tensorboard if logdir is None else logdir / run.name
    if logdir is None:  # it writes into the run
        run.check_trusted()
    board = Board(run.record, folder)
    events: Counter[str] = Counter()
    with only_writer(folder):
        for _ in run.states(_POLL_S):
            events.update(board.update())
            if not follow:
                break
    if not answered({"run": run.name, "logdir": str(board.folder), "events": events}):
        new = f"{sum(events.values())} new events of {len(events)} modules"
        say(f"{board.folder}: {new if events else 'nothing is measured yet'}")
        tell(f"  → tensorboard --logdir {board.folder}")
