"""A run's learning curve, also while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from dni_runtime.measure.curves import Panel, draw_curves
from dni_runtime.measure.figures import MetricsReader, RunFigures
from dni_runtime.run.documents.evaluations import Best
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def learning_curve(record: Record, figures: RunFigures) -> Figure:
    """Draw each metric of the evaluations by epoch, with the best one marked, and the loss."""
    panels, best = [], Best.load(record.run.best)
    for name in figures.evaluations[-1].figures if figures.evaluations else ():
        points = [
            (float(line.epoch), value)
            for line in figures.evaluations
            if (value := line.figures.get(name)) is not None
        ]
        marked = [point for point in points if best is not None and point[0] == best.epoch]
        panels.append(Panel("epoch", name, {name: points}, marked[-1] if marked else None))
    return draw_curves(figures.run, panels)


def shown_live(record: Record) -> Callable[[RunState], None]:
    """Return what shows a run's curve in a notebook, after each evaluation and at its end."""
    show, reader, shown = _display(), MetricsReader(record), -1

    def observe(state: RunState) -> None:
        nonlocal shown
        if show is None:
            return
        figures = reader.read(state)
        newest = figures.evaluations[-1].step if figures.evaluations else 0
        if newest != shown or not state.active:
            shown = newest
            show(learning_curve(record, figures))

    return observe


def _display() -> Callable[[Figure], None] | None:
    """Return what shows a figure in place of the one before; None outside of a notebook."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    handle = cast("Any", display)(display_id=True)  # it has no types

    def show(figure: Figure) -> None:
        handle.update(figure)

    return show
