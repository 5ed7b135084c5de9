"""Pictures of learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dni_runtime.errors import UnavailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """One part of a picture."""

    x: str  # name of its axis
    y: str
    curves: Mapping[str, Sequence[tuple[float, float]]]  # points by label


def draw_curves(title: str, panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side; the first of several curves is the baseline, which is dashed.

    Raises ``UnavailableError`` if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError(
            "a figure needs the package 'matplotlib'", hint="pip install 'dni-runtime[plot]'"
        ) from None
    figure = Figure(figsize=(4.5 * max(len(panels), 1), 3.6), layout="constrained")
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        for label, points in panel.curves.items():
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "label": label}
            if len(panel.curves) > 1 and label == next(iter(panel.curves)):
                style |= {"color": "black", "linestyle": "--"}
            axes.plot(*zip(*points, strict=True), **style)
        axes.set(xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        if number == 1 and len(panel.curves) > 1:
            axes.legend(fontsize="small")
    figure.suptitle(title)
    return figure
