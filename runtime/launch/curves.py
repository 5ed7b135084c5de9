"""Figure of a run's learning curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dni_runtime.errors import UnavailableError
from dni_runtime.launch.figures import RunFigures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(figures: RunFigures) -> Figure:
    """Draw the loss and each metric of a run's evaluations by epoch."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError(
            "a figure needs the package 'matplotlib'", hint="pip install 'dni-runtime[plot]'"
        ) from None
    evaluations = figures.evaluations
    names = list(evaluations[-1].figures if evaluations else {})
    figure = Figure(figsize=(4.0 * max(len(names), 1), 3.0), layout="constrained")
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), number)
        found = [(one.epoch, one.figures.get(name)) for one in evaluations]
        points = [(epoch, value) for epoch, value in found if value is not None]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
        axes.set(xlabel="epoch", ylabel=name)
        axes.grid(alpha=0.3)
    figure.suptitle(figures.run)
    return figure
