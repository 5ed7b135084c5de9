"""Lines of metrics: what workers append to ``metrics/MODULE.jsonl`` (docs/metrics.md)."""

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
    """What each line tells.

    Attributes:
        time: Unix time of writing.
        module: The module.
        attempt: Number of the module's start; from 1.
        kind: What the line is about.
        id: Position in the stream.
        epoch: The newest epoch.
        step: Training batches so far.
        samples: Training samples so far; of an evaluation, its own.
    """

    time: float = 0.0
    module: str = ""
    attempt: int = 0
    kind: str
    id: int = 0
    epoch: int = 0
    step: int = 0
    samples: int = 0


class StartLine(MetricsLine):
    """A worker has its links.

    Attributes:
        began: Unix time at which its program began.
        import_s: Seconds to import torch and the runtime.
        load_s: Seconds to load its module, its data and its state.
        connect_s: Seconds until its links were open.
    """

    kind: Literal["start"]
    began: float = 0.0
    import_s: float = 0.0
    load_s: float = 0.0
    connect_s: float = 0.0


class Measured(Document):
    """What a worker measures while it trains, and ``status`` shows; None: not known, or no such.

    "Lately" is the interval of the line: about a second, or one batch if that takes longer. Counts
    are those of an attempt in a line, and of all attempts of the run in ``status``.

    Attributes:
        batches_per_s: Training batches per second, lately.
        samples_per_s: Training samples per second, lately.
        loss: Mean training loss lately: the tail's, or an early head's.
        synthesizer_error: Error of the synthesizer, relative to the true gradient, lately.
        synthesizer_cosine: Cosine between predicted and true gradient, lately.
        lag: Mean delay of true gradients in batches, lately.
        lag_max: Largest delay of a true gradient in batches, lately.
        gradients_lost: Share of true gradients that came too late or never, lately.
        window: Most batches in flight to the next module.
        window_fill: Mean share of the window in use, lately.
        in_flight: Batches in flight to the next module, while it runs.
        waiting: Share of the time spent waiting, by reason, lately.
        cpu: CPU time per wall time, lately.
        memory_bytes: Resident memory.
        memory_peak_bytes: Peak resident memory.
        refused: Messages refused, by reason.
        missed: Batches not sent on, because the module downstream was gone.
        replayed: Batches trained on again, because the module upstream was gone.
        resent: Messages sent again to a restarted module.
        duplicates: Messages received more than once.
        gaps: Ids that never arrived.
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
    """A worker has trained for a second or so; counts are of its attempt.

    Attributes:
        interval_s: Length of the interval.
        head_accuracy: Accuracy of the early head on training batches, lately.
        gradients: True gradients received.
        gradients_unpaired: Of these: received when their batch was gone.
        gradients_given_up: Batches given up: their true gradient had not come in time.
        gradients_skipped: True gradients ignored because they were not finite.
        updates_skipped: Updates left out because the module's gradient was not finite.
        gradients_dropped: Gradients that could not be sent upstream.
        waiting_s: Seconds spent waiting, by reason.
        cpu_s: CPU seconds of the worker.
    """

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


class EpochLine(MetricsLine):
    """A training epoch has ended.

    Attributes:
        batches: Its training batches that the module has acknowledged, each counted once.
    """

    kind: Literal["epoch"]
    batches: int = 0


class Evaluation(Document):
    """The result of an evaluation: its loss, and the chain's metrics as further fields.

    Attributes:
        epoch: The epoch after which it was.
        step: Training batches until then.
        loss: Mean loss; None if it is not finite.
    """

    model_config = ConfigDict(extra="allow")

    epoch: int = 0
    step: int = 0
    loss: float | None = None

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
    """The chain (in the tail's file) or an early head has been evaluated.

    Attributes:
        trained: Training samples so far; only of plain backpropagation (``dnictl compare``).
    """

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
