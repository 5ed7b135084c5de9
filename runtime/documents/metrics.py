"""Lines of metrics, which workers append to ``metrics/MODULE.jsonl``.

docs/metrics.md describes every field. Fields that are not in a line, and null, are not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from dni_runtime.documents.base import Document
from dni_runtime.lines import LineReader

TRAIN, EVAL = b'"kind":"train"', b'"kind":"eval"'
"""Part of each line of that kind, as ``append_line`` writes it."""


class MetricsLine(Document):
    """The fields of all lines."""

    time: float = 0.0
    module: str = ""
    attempt: int = 0
    kind: str
    id: int = 0
    epoch: int = 0
    step: int = 0
    samples: int = 0


class StartLine(MetricsLine):
    """A worker's links are open."""

    kind: Literal["start"]
    began: float = 0.0
    import_s: float = 0.0
    load_s: float = 0.0
    connect_s: float = 0.0


class Measured(Document):
    """What a worker measures while it trains, and ``status`` shows; None: not known.

    Counts are those of an attempt in a line, and those of all attempts of the run in ``status``.
    """

    batches_per_s: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    synthesizer_error: float | None = None
    synthesizer_cosine: float | None = None
    lag: float | None = None
    lag_max: int | None = None
    gradients_lost: float | None = None
    window: int | None = None
    window_fill: float | None = None
    in_flight: int | None = None
    waiting: dict[str, float] = Field(default_factory=dict)
    cpu: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    refused: dict[str, int] = Field(default_factory=dict)
    missed: int | None = None
    replayed: int | None = None
    resent: int | None = None
    duplicates: int | None = None
    gaps: int | None = None


class TrainLine(Measured, MetricsLine):
    """A worker has trained for a second or so."""

    kind: Literal["train"]
    interval_s: float = 0.0
    head_accuracy: float | None = None
    gradients: int = 0
    gradients_unpaired: int = 0
    gradients_given_up: int = 0
    gradients_skipped: int = 0
    updates_skipped: int = 0
    gradients_dropped: int = 0
    waiting_s: dict[str, float] = Field(default_factory=dict)
    cpu_s: float = 0.0
    shared_bytes: int | None = None


class EpochLine(MetricsLine):
    """A training epoch has ended."""

    kind: Literal["epoch"]
    batches: int = 0


class Evaluation(Document):
    """The result of an evaluation: its loss, and the chain's metrics as further fields."""

    model_config = ConfigDict(extra="allow")

    epoch: int = 0  # after which it was
    step: int = 0  # training batches until then
    loss: float | None = None  # mean; None: not finite

    @property
    def figures(self) -> dict[str, float | None]:
        """The loss and the metrics, by name; None: not finite."""
        more = (self.__pydantic_extra__ or {}).items()
        metrics = {k: v for k, v in more if v is None or isinstance(v, int | float)}
        return {"loss": self.loss, **metrics}

    @property
    def accuracy(self) -> float | None:
        """The accuracy, if it is one of the metrics."""
        return self.figures.get("accuracy")


class EvaluationLine(Evaluation, MetricsLine):
    """The chain (in the tail's file) or an early head has been evaluated."""

    model_config = ConfigDict(extra="allow")

    kind: Literal["eval", "test"]
    trained: int | None = None


_LINES: TypeAdapter[StartLine | TrainLine | EpochLine | EvaluationLine] = TypeAdapter(
    Annotated[StartLine | TrainLine | EpochLine | EvaluationLine, Field(discriminator="kind")]
)
LineT = TypeVar("LineT", bound=MetricsLine)


def parse_line(text: bytes) -> MetricsLine | None:
    """Return a line; None if it is damaged, or of a kind that this version does not know."""
    try:
        return _LINES.validate_json(text)
    except ValidationError:
        return None


def parse_train(text: bytes) -> TrainLine | None:
    """Return a line about training; None if it is another one, or damaged."""
    line = parse_line(text) if TRAIN in text else None
    return line if isinstance(line, TrainLine) else None


def parse_evaluation(text: bytes) -> EvaluationLine | None:
    """Return a line about an evaluation; None if it is another one, or damaged."""
    line = None if TRAIN in text else parse_line(text)
    return line if isinstance(line, EvaluationLine) else None


def read_metrics(path: Path, kind: type[LineT]) -> Iterator[LineT]:
    """Yield a file's lines of one kind, or of all kinds (``MetricsLine``), one after the other."""
    return (line for line in LineReader(path, parse_line).new() if isinstance(line, kind))
