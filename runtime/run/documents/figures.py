"""Figures: fields of documents that measure something, and their page for Prometheus.

A field that is declared by :func:`gauge`, :func:`counter` or :func:`histogram` says what it
measures and where it is shown: lines, ``status``, TensorBoard and Prometheus' page follow from
that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field

from dni_runtime.run.documents.base import Document

Point = tuple[dict[str, str], Any]
"""A value of a figure, and its labels; None: not known."""

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Figure(NamedTuple):
    """A field of a document that measures something."""

    name: str
    help: str
    unit: str
    kind: str  # ``gauge``; ``counter``: from the start of the run; ``histogram``
    column: str  # of the table of ``status``; empty: it has none
    tag: str  # of TensorBoard, or the beginning of one for each reason; empty: it has none
    by: str  # what the keys of its value are, if it has several


class Histogram(Document):
    """How many values were at most as large as each bound; it changes in place."""

    model_config = ConfigDict(frozen=False)

    bounds: tuple[float, ...]
    counts: list[int]  # of values above the bound before; the last one is above all bounds
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Histogram:
        return cls(bounds=tuple(bounds), counts=[0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def gauge(
    help: str, unit: str = "", *, column: str = "", tag: str = "", default: Any = None
) -> Any:
    """Declare a field of a document as a figure that is of now, or of the interval."""
    return _field(Figure("", help, unit, "gauge", column, tag, "reason"), default)


def counter(
    help: str, unit: str = "", *, column: str = "", by: str = "reason", default: Any = None
) -> Any:
    """Declare a field of a document as a figure that only grows."""
    return _field(Figure("", help, unit, "counter", column, "", by), default)


def histogram(help: str, unit: str = "", *, bounds: Sequence[float]) -> Any:
    """Declare a field of a document as a distribution of values."""
    return _field(Figure("", help, unit, "histogram", "", "", ""), Histogram.of(bounds))


def _field(about: Figure, default: Any) -> Any:
    return Field(  # a copy for each document: a histogram changes in place
        default_factory=partial(deepcopy, default),
        description=about.help,
        json_schema_extra={**about._asdict()},
    )


@cache
def figures_of(document: type[Document]) -> tuple[Figure, ...]:
    """Return the figures of a document, in the order of its fields."""
    return tuple(
        Figure(*map(str, extra.values()))._replace(name=name)
        for name, field in document.model_fields.items()
        if isinstance(extra := field.json_schema_extra, dict)
    )


def page(families: Iterable[list[str]]) -> str:
    """Return Prometheus' page of families.

    Source: "Exposition formats" in Prometheus' documentation, version 0.0.4.
    """
    return "".join(f"{line}\n" for lines in families for line in lines)


def families(documents: Sequence[tuple[dict[str, str], Document]]) -> Iterable[list[str]]:
    """Yield the family of each figure, of documents of one type with these labels."""
    kinds = {type(document) for _, document in documents}
    for figure in [figure for kind in kinds for figure in figures_of(kind)]:
        points: list[Point] = []
        for labels, document in documents:
            value = getattr(document, figure.name)
            if isinstance(value, dict):
                points += [({**labels, figure.by: key}, part) for key, part in value.items()]
            else:
                points.append((labels, value))
        yield family(figure.name, figure.kind, figure.help, points)


def family(name: str, kind: str, help: str, points: Sequence[Point]) -> list[str]:
    """Return the lines of a figure; none if no value is known."""
    name = f"dni_{name}_total" if kind == "counter" else f"dni_{name}"
    lines = []
    for labels, value in points:
        if isinstance(value, Histogram):
            counts = [*accumulate(value.counts)]
            for bound, count in zip((*value.bounds, "+Inf"), counts, strict=True):
                lines.append(_line(f"{name}_bucket", {**labels, "le": str(bound)}, count))
            lines.append(_line(f"{name}_sum", labels, value.sum))
            lines.append(_line(f"{name}_count", labels, counts[-1]))
        elif value is not None:
            lines.append(_line(name, labels, value))
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}", *lines] if lines else []


def _line(name: str, labels: dict[str, str], value: Any) -> str:
    text = ",".join(f'{key}="{label.translate(_ESCAPED)}"' for key, label in labels.items())
    return f"{name}{{{text}}} {value}"
