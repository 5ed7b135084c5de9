"""Lines of metrics and events: their schemas, their pages, and what other versions wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from dni_runtime.files import append_line
from dni_runtime.run.documents.events import Event, EventKind
from dni_runtime.run.documents.figures import Figure, figures_of
from dni_runtime.run.documents.metrics import (
    EpochLine,
    EvaluationLine,
    MetricsLine,
    StartLine,
    TrainLine,
    parse_evaluation,
    parse_line,
    parse_train,
    read_metrics,
)

COMMON = figures_of(MetricsLine)
DOCS = Path(__file__).resolve().parents[4] / "docs"


def table(page: str, heading: str, column: int = 0) -> list[set[str]]:
    """The names in one column of the table below a heading, by row."""
    below = page[page.index(f"\n{heading}") :]
    section = re.split(r"\n\|[-|]+\|\n", below, maxsplit=1)[1].split("\n\n")[0]
    return [set(re.findall(r"`(\w+)`", row.split(" | ")[column])) for row in section.splitlines()]


def rows(figures: Iterable[Figure]) -> str:
    """The rows of a table of docs/metrics.md."""
    text = ""
    for one in figures:
        unit = ", ".join(filter(None, (one.unit, "counter" * (one.kind == "counter"))))
        shown = ", ".join(f"`{name}`" for name in (one.column, one.tag) if name)
        text += f"| `{one.name}` | {unit} | {one.help} | {shown} |\n".replace("  ", " ")
    return text


@pytest.mark.parametrize("line", [MetricsLine, StartLine, TrainLine, EpochLine])
def test_the_page_has_the_figures(line: type[MetricsLine]) -> None:
    own = [one for one in figures_of(line) if line is MetricsLine or one not in COMMON]
    assert f"|---|---|---|---|\n{rows(own)}\n" in (DOCS / "metrics.md").read_text()
    assert {one.name for one in figures_of(line)} | {"kind"} == line.model_fields.keys()


def test_the_page_has_the_events_of_the_schema() -> None:
    page = (DOCS / "operations.md").read_text()
    assert set().union(*table(page, "| event ")) == set(get_args(EventKind))
    fields = {"from" if name == "from_" else name for name in Event.model_fields}
    shown = set().union(*table(page, "| event ", 1))
    assert fields - {"time", "event", "module", "error"} <= shown


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines: list[MetricsLine] = [
        StartLine(kind="start", time=1.0, module="a", attempt=1),
        TrainLine(kind="train", step=3, lag=0.5, waiting={"input": 0.25}),
        EpochLine(kind="epoch", batches=3),
        EvaluationLine.model_validate({"kind": "eval", "loss": None, "accuracy": 0.5}),
    ]
    for line in lines:
        append_line(path, line.to_dict())
    assert list(read_metrics(path, MetricsLine)) == lines
    assert list(read_metrics(path, TrainLine)) == lines[1:2]
    assert lines[3].to_dict() == {"kind": "eval", "loss": None, "accuracy": 0.5}


def test_other_versions_are_read_as_far_as_they_are_known() -> None:
    old = parse_train(b'{"time":1.5,"kind":"train","step":4,"mood":"good"}')
    assert old == TrainLine(kind="train", time=1.5, step=4)
    assert parse_line(b'{"kind":"dream","step":4}') is None
    evaluation = parse_evaluation(b'{"kind":"test","loss":1,"mae":null,"mood":"good","f1":0.5}')
    assert evaluation is not None
    assert evaluation.figures == {"loss": 1.0, "mae": None, "f1": 0.5}
    assert evaluation.accuracy is None
    event = Event.parse(b'{"time":1,"event":"run_dreamt","of":"sheep","from":"n1"}')
    assert event is not None
    assert (event.event, event.from_) == ("run_dreamt", "n1")
    assert event.to_dict() == {"time": 1, "event": "run_dreamt", "of": "sheep", "from": "n1"}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"step":1}', '{"kind":"train","step":"x"}'])
def test_damaged_lines_are_none(text: str) -> None:
    assert parse_line(text.encode()) is None
    assert Event.parse(text.encode()) is None


def test_what_is_null_or_missing_is_not_known() -> None:
    line = parse_train(json.dumps({"kind": "train", "loss": None}, separators=(",", ":")).encode())
    assert line is not None
    assert (line.loss, line.lag, line.missed, line.waiting) == (None, None, None, {})
