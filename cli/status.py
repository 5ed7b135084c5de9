"""What runs do now: ``ps`` and ``status``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.show import (
    Column,
    chain_line,
    console,
    duration,
    modules_table,
    percent,
    print_table,
    quantity,
    short_names,
    state,
)
from dnictl.terminal import answered, json_wanted, printable, tell

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.measure.figures import RunFigures

_MOST_SETTINGS = 8  # columns of a table
_WATCH_S = 2.0


@click.command()
@options.runs
@click.option("--settings", "with_settings", is_flag=True,
              help="Show settings that are not the same in all runs of a chain.")  # fmt: skip
@options.json
def ps(runs: Path, with_settings: bool) -> None:
    """List the runs, oldest first.

    \b
    Example:
      dnictl ps --settings
      dnictl ps --json | jq -r '.[-1].run'
    """
    from dni_runtime.api.run import runs_in
    from dni_runtime.measure.figures import MetricsReader

    listed = runs_in(runs)
    rows = [MetricsReader(run.record, evaluations=1).read(its) for run, its in listed]
    settings = _settings([run for run, _ in listed]) if with_settings else {}
    if answered([
        row.model_dump(exclude={"modules", "evaluations"})
        | ({"settings": settings[row.path]} if with_settings else {})
        for row in rows
    ]):  # fmt: skip
        return
    if not rows:
        tell(f"no runs in {str(runs)!r}")
        return
    now = time.time()
    columns: list[Column[RunFigures]] = [
        Column("run"),
        Column("state", text=state),
        *_setting_columns(settings),
        quantity("epoch", lambda row: f"{row.epoch or 0}/{row.epochs}"),
        quantity("accuracy", text=percent),
        quantity("age", lambda row: now - row.created, duration),
        Column("backend"),
    ]
    print_table(columns, rows)
    for row in rows:
        if row.state == "stalled":
            tell(f"{row.run}: {row.error}")


def _settings(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return the settings in which runs of one chain differ, by their directories."""
    from dni_runtime.files import peek_json
    from dni_runtime.spec.settings import differing

    found = {}
    for chain in {run.record.chain for run in runs}:
        alike = [run for run in runs if run.record.chain == chain]
        documents = [peek_json(run.directory.chain) for run in alike]
        for run, settings in zip(alike, differing(documents), strict=True):
            found[str(run.directory.root)] = settings
    return found


def _setting_columns(settings: Mapping[str, Mapping[str, Any]]) -> list[Column[RunFigures]]:
    paths = list(dict.fromkeys(path for one in settings.values() for path in one))
    if len(paths) > _MOST_SETTINGS:
        tell(f"{len(paths) - _MOST_SETTINGS} more settings differ: see --json")
    return [
        quantity(path, partial(_setting, settings, path), title=title)
        for path, title in zip(paths, short_names(paths), strict=True)
    ][:_MOST_SETTINGS]


def _setting(settings: Mapping[str, Mapping[str, Any]], path: str, row: RunFigures) -> Any:
    return settings[row.path].get(path)


@click.command()
@options.of_run
@click.option("--watch", is_flag=True, help="Show it every two seconds until the run has ended.")
@click.option("--prometheus", is_flag=True, help="Print the figures in Prometheus' text format.")
@options.json
def status(run: Run, watch: bool, prometheus: bool) -> None:
    """Show a run: its state, and the figures of each module.

    cosine: how alike predicted and true gradients are; lag: how many batches late true ones come;
    lost: the share that never came; waits: what for, and for which share of the time.

    \b
    Example:
      dnictl status
      dnictl status --watch
    """
    from dni_runtime.measure.figures import EVALUATIONS, MetricsReader, prometheus_page

    reader = MetricsReader(run.record, evaluations=EVALUATIONS if json_wanted() else 1)
    if watch and (json_wanted() or prometheus):
        raise UsageError("--watch is for people", hint="leave out --json and --prometheus")
    if watch:
        for now in run.states(_WATCH_S):
            click.clear()
            _show(reader.read(now))
        return
    figures = reader.read(run.state())
    if answered(figures.model_dump()):
        return
    if prometheus:
        click.echo(printable(prometheus_page(figures)), nl=False)
    else:
        _show(figures)


def _show(figures: RunFigures) -> None:
    from rich.text import Text

    to = console()
    where = "" if figures.job is None else f"  job {figures.job}"
    path = printable(f"  {figures.backend}{where}  {figures.path}")
    to.print(Text.assemble((printable(figures.run), "bold"), path), soft_wrap=True)
    to.print(state(figures.state), end=" ")
    to.print(chain_line(figures), soft_wrap=True)
    if figures.error:
        to.print(Text(printable(figures.error), style="red"), soft_wrap=True)
    to.print(modules_table(figures))
    for module in figures.modules:
        if module.diverged:
            what, batch, times = module.diverged.what, module.diverged.batch, module.diverged.times
            tell(f"{module.module}: {what} is not finite at batch {batch} ({times} times so far)")
        if module.warning:
            tell(f"{module.module}: {module.warning}")
    if old := {module.module: module.age_s for module in figures.modules if module.age_s}:
        tell(
            f"{', '.join(old)}: these figures are {duration(max(old.values()))} old; newer ones "
            "cannot be written (is the disk full?), or the worker does not respond"
        )
    if figures.state == "unsupervised":
        tell(
            "its supervisor is gone, its workers keep running; 'dnictl stop' stops them, "
            "'dnictl resume' restarts the run with a supervisor"
        )
    if figures.state == "lost":
        tell(f"its supervisor is gone; continue with 'dnictl resume {figures.run}'")
