"""Pictures of learning curves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.measure.curves import Panel, draw_curves

POINTS = [(1.0, 0.5), (2.0, 0.9)]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, two = Panel("epoch", "loss", {"loss": POINTS}), Panel("s", "a", {"x": POINTS, "y": []})
    figure = draw_curves("small", [one, two])
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    alone, several = ([line.get_linestyle() for line in axes.lines] for axes in figure.axes)
    assert alone == ["-"]
    assert several[0] == "--", "the baseline"
    assert not draw_curves("before the first evaluation", []).axes


def test_epochs_are_whole_and_the_best_is_marked() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_curves("small", [Panel("epoch", "a", {"a": POINTS}, best=POINTS[1])])
    (axes,) = figure.axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    _, star = axes.lines
    assert (star.get_marker(), [*star.get_xydata()[0]]) == ("*", [2.0, 0.9])
    (word,) = axes.texts
    assert word.get_text() == "best"
    figure.draw_without_rendering()
    inside, text = axes.get_window_extent(), word.get_window_extent()
    assert inside.x0 < text.x0 < text.x1 < inside.x1
    assert inside.y0 < text.y0 < text.y1 < inside.y1, "the highest point is that of the best"
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnavailableError, match="needs the package 'matplotlib'"):
        draw_curves("small", [])
