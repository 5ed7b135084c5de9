"""Figures as text for people: tables, numbers, times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from dni_runtime.documents.metrics import Evaluation
    from dni_runtime.launch.figures import ModuleFigures, RunFigures

_WIDE = 400

# Control characters but newline and tab, and those that turn the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

STYLES = {
    "running": "green",
    "finished": "green",
    "queued": "yellow",
    "starting": "yellow",
    "connecting": "yellow",
    "inactive": "dim",
    "restarting": "yellow",
    "stalled": "bold red",
    "unsupervised": "bold yellow",
    "stopping": "yellow",
    "stopped": "yellow",
    "failed": "bold red",
    "lost": "bold red",
}


def printable(text: str) -> str:
    """Return text that workers may have written, with terminal control characters escaped."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[RenderableType]], right: Set[str] = frozenset()
) -> Table:
    """Return a plain table; columns named in ``right`` hold numbers."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(printable(one)) if isinstance(one, str) else one for one in row))
    return made


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[RenderableType]], right: Set[str] = frozenset()
) -> None:
    """Print a table to stdout; nothing is cut off unless that is a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    console.print(table(columns, rows, right))


def state(word: str) -> RenderableType:
    """Return a state in its colour."""
    from rich.text import Text

    return Text(printable(word), style=STYLES.get(word, ""))


def number(value: float | None) -> str:
    """Return a figure, or a dash."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"


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


MODULE_COLUMNS = (
    "module", "state", "step", "samples/s", "loss", "accuracy", "cosine", "lag", "lost", "waits",
)  # fmt: skip
"""Accuracy: newest evaluation of the early head, at the tail of the chain; the rest: recent."""
_RIGHT = frozenset(MODULE_COLUMNS[2:-1])
_IDLE = 0.005


TROUBLE = ("restarts", "missed", "replayed")
"""Columns that are shown if a module has a count in them."""


def modules_table(figures: RunFigures) -> Table:
    """Return a table with one row per module; on a cluster with its node."""
    from dni_runtime.spec.replicas import tails_of

    tails = tails_of([module.module for module in figures.modules])
    extra = [name for name in TROUBLE if any(getattr(one, name) for one in figures.modules)]
    columns = list(MODULE_COLUMNS)
    if figures.job is not None:
        columns.insert(1, "node")
    rows = []
    for module in figures.modules:
        row = _row(module, figures.accuracy if module.module in tails else module.head_accuracy)
        if figures.job is not None:
            row.insert(1, module.host or "-")
        more = (f"{getattr(module, name):,}" if getattr(module, name) else "-" for name in extra)
        rows.append([*row, *more])
    return table((*columns, *extra), rows, _RIGHT | set(extra))


def _row(module: ModuleFigures, accuracy: float | None) -> list[RenderableType]:
    return [
        module.module,
        state(module.state if module.signal is None else f"{module.state} ({module.signal})"),
        "-" if module.step is None else f"{module.step:,}",
        number(module.samples_per_s),
        "nan" if _loss_diverged(module) else number(module.loss),
        percent(accuracy),
        "-" if module.synthesizer_cosine is None else f"{module.synthesizer_cosine:.2f}",
        number(module.lag),
        percent(module.gradients_lost, 1),
        waits(module.waiting),
    ]


def _loss_diverged(module: ModuleFigures) -> bool:
    found = module.diverged
    return module.loss is None and found is not None and found.what == "the loss"


def waits(waiting: Mapping[str, float]) -> str:
    """Return what a module waits for most, and the share of its time."""
    reason = max(waiting, key=waiting.__getitem__, default="")
    if not reason or waiting[reason] < _IDLE:
        return "-"
    return f"{reason} {percent(waiting[reason], 0)}"


def evaluation(one: Evaluation) -> list[str]:
    """Return an evaluation's loss and, if it has one, accuracy."""
    parts = [f"loss {number(one.loss)}"]
    if one.accuracy is not None:
        parts.insert(0, f"accuracy {percent(one.accuracy)}")
    return parts


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
