"""Figures as text for people: tables, numbers, times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dnictl.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType
    from rich.table import Table

    from dni_runtime.measure.figures import ModuleFigures, RunFigures
    from dni_runtime.run.documents.figures import Figure
    from dni_runtime.run.documents.metrics import Evaluation

Row = TypeVar("Row")
_WIDE = 400

_WORDS = {
    "green": "running finished",
    "yellow": "queued starting connecting restarting stopping stopped",
    "bold yellow": "unsupervised",
    "bold red": "stalled failed lost",
    "dim": "inactive",
}
STYLES = {word: style for style, words in _WORDS.items() for word in words.split()}


def shown(value: Any) -> str:
    """Return a value as text, or a dash for None."""
    return "-" if value is None else str(value)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One figure of every row: its key in JSON, and its title and text in a table."""

    key: str  # in JSON
    of: str | Callable[[Row], Any] | None = None  # attribute or function of a row; None: the key
    text: Callable[[Any], RenderableType] = shown  # of the figure, in a table
    title: str | None = None  # in a table; None: the key; empty: it is only in JSON
    right: bool = False  # aligned, in a table
    in_json: bool = True

    def figure(self, row: Row) -> Any:
        if callable(self.of):
            return self.of(row)
        name = self.of or self.key
        return row[name] if isinstance(row, Mapping) else getattr(row, name)


def quantity(
    key: str,
    of: str | Callable[[Row], Any] | None = None,
    text: Callable[[Any], RenderableType] = shown,
    title: str | None = None,
    *,
    in_json: bool = True,
) -> Column[Row]:
    """Return a column of numbers."""
    return Column(key, of, text, title, right=True, in_json=in_json)


def documents(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return a JSON object for each row."""
    written = [column for column in columns if column.in_json]
    return [{column.key: column.figure(row) for column in written} for row in rows]


def table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, header_style="bold", pad_edge=False)
    visible = [column for column in columns if column.title != ""]
    for column in visible:
        side: JustifyMethod = "right" if column.right else "left"
        made.add_column(column.title or column.key, justify=side, no_wrap=True)
    for row in rows:
        cells = (column.text(column.figure(row)) for column in visible)
        made.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))
    return made


def print_table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> None:
    """Print a table to stdout."""
    console().print(table(columns, rows))


def console() -> Console:
    """Return stdout for tables; nothing is cut off unless it is a terminal."""
    from rich.console import Console

    stdout = Console(highlight=False)
    return stdout if stdout.is_terminal else Console(highlight=False, width=_WIDE)


def state(word: str) -> RenderableType:
    from rich.text import Text

    return Text(printable(word), style=STYLES.get(word, ""))


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last words of settings' paths, and whole paths where those are the same."""
    last = [path.rpartition(".")[2] for path in paths]
    return [path if last.count(word) > 1 else word for path, word in zip(paths, last, strict=True)]


def number(value: float | None) -> str:
    """Return a figure, or a dash."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"


def decimals(digits: int, value: float | None) -> str:
    """Return a figure with so many digits after the point, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def thousands(value: float | None) -> str:
    """Return a whole number with its thousands marked, or a dash."""
    return "-" if value is None else f"{value:,.0f}"


def megabytes(nbytes: float, digits: int = 0) -> str:
    """Return a size in units of 1e6 bytes."""
    return f"{nbytes / 1e6:.{digits}f} MB"


def percent(value: float | None, digits: int = 2) -> str:
    """Return a share in per cent, or a dash."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Return a span of time in its two largest units."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    for size, unit, smaller, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {small}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


_IDLE = 0.005


def modules_table(figures: RunFigures) -> Table:
    """Return a table with one row per module; on a cluster with its node.

    Accuracy is that of the newest evaluation, of the early head or at the tail; the rest is recent.
    Counters are shown if a module has counted something; of modules that are served, what is known.
    """
    from dni_runtime.measure.figures import ModuleFigures
    from dni_runtime.run.documents.figures import figures_of
    from dni_runtime.spec.replicas import tails_of

    modules = figures.modules
    trained = all(module.compute_s is None for module in modules)
    tails = tails_of([module.module for module in modules])

    def accuracy(module: ModuleFigures) -> float | None:
        if module.module in tails:
            return figures.accuracy
        return module.evaluation.accuracy if module.evaluation else None

    columns: list[Column[ModuleFigures]] = [
        Column("module"),
        Column("host", title="" if figures.job is None else "node"),
        Column("state", lambda m: f"{m.state} ({m.signal})" if m.signal else m.state, state),
        quantity("step", text=thousands),
        quantity("accuracy", accuracy, percent),
        *(
            _column(figure)
            for figure in figures_of(ModuleFigures)
            if figure.column
            and (
                any(getattr(m, figure.name) for m in modules)
                or (trained and figure.kind == "gauge" and figure.name != "compute_s")
            )
        ),
    ]
    return table(columns, modules)


def _column(figure: Figure) -> Column[ModuleFigures]:
    if figure.name == "waiting":
        return Column(figure.name, text=waits, title=figure.column)
    text: Callable[[Any], str] = partial(percent, digits=1) if figure.unit == "share" else number
    if figure.kind == "counter":
        text = _count
    of = _loss if figure.name == "loss" else None
    return quantity(figure.name, of, text, title=figure.column)


def _count(count: int | None) -> str:
    return thousands(count or None)


def _loss(module: ModuleFigures) -> float | None:
    cause = module.diverged
    diverged = module.loss is None and cause is not None and cause.what == "the loss"
    return math.nan if diverged else module.loss


def waits(waiting: Mapping[str, float]) -> str:
    """Return what a module waits for most, and the share of its time."""
    reason = max(waiting, key=waiting.__getitem__, default="")
    if not reason or waiting[reason] < _IDLE:
        return "-"
    return f"{reason} {percent(waiting[reason], 0)}"


def evaluation(result: Evaluation) -> list[str]:
    """Return an evaluation's loss and, if it has one, accuracy."""
    accuracy = [] if result.accuracy is None else [f"accuracy {percent(result.accuracy)}"]
    return [*accuracy, f"loss {number(result.loss)}"]


def chain_line(figures: RunFigures) -> str:
    """Return the chain in one line: epoch, accuracy, pace, time left."""
    parts = [f"epoch {figures.epoch or 0}/{figures.epochs}"]
    if figures.step and figures.total_steps:
        parts.append(f"batch {figures.step:,}/{figures.total_steps:,}")
    if figures.accuracy is not None:
        parts.append(f"accuracy {percent(figures.accuracy)}")
    if figures.test is not None:
        parts.append(f"test {evaluation(figures.test)[0]}")
    if figures.samples_per_s is not None:
        parts.append(f"{number(figures.samples_per_s)} samples/s")
    if figures.eta_s is not None:
        parts.append(f"{duration(figures.eta_s)} left")
    return ", ".join(parts)
