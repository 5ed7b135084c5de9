"""Pictures of learning curves, and of confusion matrices."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dni_runtime.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WRITTEN = 25
"""The most classes whose counts are written into a confusion matrix."""


class Panel(NamedTuple):
    x: str  # name of its axis
    y: str
    curves: Mapping[str, Sequence[tuple[float, float]]]  # points by label
    best: tuple[float, float] | None = None  # the point of the best checkpoint


def draw_curves(title: str, panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side; the first of several curves is the baseline, which is dashed."""
    figure = _figure(4.5 * max(len(panels), 1), 3.6)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        for label, points in panel.curves.items():
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "label": label}
            if len(panel.curves) > 1 and label == next(iter(panel.curves)):
                style |= {"color": "black", "linestyle": "--"}
            axes.plot(*zip(*points, strict=True), **style)
        axes.set(xlabel=panel.x, ylabel=panel.y)
        if panel.x == "epoch":  # there are no halves
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        if panel.best is not None:
            axes.plot(*panel.best, marker="*", markersize=10, color="tab:red", linestyle="")
            axes.margins(y=0.15)  # the word stays within the frame
            axes.annotate("best", panel.best, (0, 6), textcoords="offset points", ha="center")
        axes.grid(alpha=0.3)
        if number == 1 and len(panel.curves) > 1:  # below, where it hides no curve
            columns = min(len(panel.curves), 2 * len(panels))
            figure.legend(loc="outside lower center", fontsize="small", ncols=columns)
    figure.suptitle(title)
    return figure


def draw_matrix(counts: Sequence[Sequence[int]]) -> Figure:
    """Draw a confusion matrix: a row for each label, shaded by its share, with the counts."""
    classes = len(counts)
    side = min(max(0.45 * classes, 3.0), 12.0)
    figure = _figure(side + 1.0, side)
    axes = figure.add_subplot()
    shares = [[one / (sum(row) or 1) for one in row] for row in counts]
    figure.colorbar(
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the label's samples"
    )
    axes.set(xlabel="prediction", ylabel="label")
    if classes <= _WRITTEN:
        axes.set(xticks=range(classes), yticks=range(classes))
        for row, column in product(range(classes), repeat=2):
            colour = "white" if shares[row][column] > 0.5 else "black"
            text = str(counts[row][column])
            axes.text(column, row, text, color=colour, fontsize="small", ha="center", va="center")
    return figure


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure to a file, in the format of the file's ending."""
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:  # matplotlib knows no such format
        raise UsageError(f"{str(file)!r} cannot be drawn: {error}") from None


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError(
            "a figure needs the package 'matplotlib'", hint="pip install 'dni-runtime[plot]'"
        ) from None

    class Picture(Figure):
        """A figure that a notebook shows, without pyplot."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    return Picture(figsize=(width, height), layout="constrained")
