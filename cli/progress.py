"""Progress of a running run: a live table on a terminal, sparse lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import DataError
from dnictl.show import chain_line, duration, evaluation, modules_table, number
from dnictl.terminal import printable, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dni_runtime.api.run import Run
    from dni_runtime.measure.figures import RunFigures
    from dni_runtime.run.documents.metrics import EvaluationLine
    from dni_runtime.run.documents.state import RunState

_LIVE_S = 0.5
_PLAIN_S = 1.0


@contextmanager
def progress(run: Run, *, quiet: bool = False) -> Iterator[Callable[[RunState], None]]:
    """Show a run's progress on stderr, by its state with which it is called."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda state: None
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False, transient=True) as live:

            def show(figures: RunFigures) -> None:
                live.update(_picture(figures), refresh=True)

            yield _throttled(run, _LIVE_S, show)
    else:
        yield _throttled(run, _PLAIN_S, PlainLines())


def _throttled(
    run: Run, every_s: float, show: Callable[[RunFigures], None]
) -> Callable[[RunState], None]:
    """Return what shows a run's figures at most every ``every_s`` seconds.

    A closed terminal or pipe, or a figure that cannot be read, does not end the run.
    """
    from dni_runtime.measure.figures import MetricsReader

    reader, due = MetricsReader(run.record), 0.0

    def look(state: RunState) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due or not state.active:
            due = now + every_s
            with suppress(OSError, DataError):
                show(reader.read(state))

    return look


class PlainLines:
    """A line for each new phase of the run, restart, loss and evaluation; for logs and pipes."""

    def __init__(self) -> None:
        self._phase = ""
        self._shown: set[tuple[int, int, float]] | None = None
        self._restarts: dict[str, int] = {}
        self._started: set[str] = set()

    def __call__(self, figures: RunFigures) -> None:
        from dni_runtime.run.documents.state import ACTIVE

        for module in figures.modules:
            if module.restarts > self._restarts.get(module.module, 0):
                self._restarts[module.module] = module.restarts
                click.echo(f"{module.module}: restarted ({module.restarts})", err=True)
            if module.state not in ("new", "inactive"):
                self._started.add(module.module)
            elif module.state == "inactive" and module.module in self._started:
                self._started.remove(module.module)
                click.echo(f"{module.module}: inactive", err=True)
        if figures.state in ACTIVE:
            self._tell_phase(figures)
        evaluations, tests = figures.evaluations, [figures.test] if figures.test else []
        if self._shown is None:  # by an earlier attempt
            every = (*evaluations, *tests)
            self._shown = {_key(result) for result in every if result.attempt < figures.attempt}
        for result in (*evaluations, *tests):
            if _key(result) in self._shown:
                continue
            self._shown.add(_key(result))
            if result is figures.test:
                line = f"test: {', '.join(evaluation(result))}"
            else:
                line = self._line(result, figures, newest=result is evaluations[-1])
            click.echo(line, err=True)
        self._tell_phase(figures)

    def _tell_phase(self, figures: RunFigures) -> None:
        if figures.state != self._phase:
            self._phase = figures.state
            why = f": {figures.error}" if figures.state == "stalled" else ""
            tell(f"{figures.run}: {figures.state}{why}")

    def _line(self, result: EvaluationLine, figures: RunFigures, *, newest: bool) -> str:
        parts = evaluation(result)
        if newest and figures.samples_per_s is not None:
            parts.append(f"{number(figures.samples_per_s)} samples/s")
        if newest and figures.eta_s:
            parts.append(f"{duration(figures.eta_s)} left")
        return f"epoch {result.epoch}/{figures.epochs}: {', '.join(parts)}"


def _key(result: EvaluationLine) -> tuple[int, int, float]:
    return result.attempt, result.step, result.time  # which may be earlier: clocks are set back


def _picture(figures: RunFigures) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble((figures.run, "bold"), f"  {figures.state}  {figures.backend}")
    if figures.state == "stalled":
        head.append(printable(f"\n{figures.error}"), "red")
    line = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=figures.total_steps, completed=figures.step or 0, width=20)
    line.add_row(*([bar] if figures.total_steps else []), Text(chain_line(figures)))
    return Group(head, modules_table(figures), line)
