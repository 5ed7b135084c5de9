"""Lines of metrics, which workers append to ``metrics/MODULE.jsonl``.

docs/metrics.md follows from what their fields say. Fields that are not in a line, and null, are not
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.figures import counter, gauge
from dni_runtime.run.lines import LineReader

TRAIN, EVAL = b'"kind":"train"', b'"kind":"eval"'
"""Part of each line of that kind, as ``append_line`` writes it."""


class MetricsLine(Document):
    """The fields of all lines."""

    time: float = gauge("Unix time of writing", "s", default=0.0)
    module: str = gauge("module that wrote the line", default="")
    attempt: int = gauge("start of the module that wrote the line", default=0)
    kind: str = gauge("`start`, `train`, `epoch`, `eval` or `test`", default=...)
    id: int = gauge("position in the stream of batches and markers", default=0)
    epoch: int = gauge("the newest epoch", default=0)
    step: int = counter(
        "training batches acknowledged in the whole run, each counted once", "batches", default=0
    )
    samples: int = counter(
        "samples of these batches; in `eval` and `test` lines: samples evaluated", default=0
    )


class StartLine(MetricsLine):
    """A worker's links are open."""

    kind: Literal["start"]
    began: float = gauge("Unix time at which its program began", "s", default=0.0)
    import_s: float = gauge("time to import torch and the runtime", "s", default=0.0)
    load_s: float = gauge("time to load its module, its data, its state", "s", default=0.0)
    connect_s: float = gauge(
        "time until its links were open, including its neighbours' starts", "s", default=0.0
    )


class TrainingFigures(Document):
    """What a worker measures while it trains, and ``status`` shows; None: not known."""

    batches_per_s: float | None = gauge("training rate", "1/s", tag="train/batches_per_s")
    samples_per_s: float | None = gauge(
        "training rate", "1/s", column="samples/s", tag="train/samples_per_s"
    )
    compute_s: float | None = gauge(
        "time to compute a batch, if the module is served", "s", column="s/batch"
    )
    loss: float | None = gauge(
        "mean over the batches: of the chain at the tail, else of the early head",
        column="loss",
        tag="train/loss",
    )
    head_accuracy: float | None = gauge(
        "accuracy of the early head on training batches", "share", tag="head/train_accuracy"
    )
    synthesizer_error: float | None = gauge(
        "squared error of the synthetic gradient over the true one's squared norm",
        tag="synthesizer/error",
    )
    synthesizer_cosine: float | None = gauge(
        "cosine between the synthetic and the true gradient of a batch",
        column="cosine",
        tag="synthesizer/cosine",
    )
    lag: float | None = gauge(
        "mean age of the true gradients received", "batches", column="lag", tag="gradients/lag"
    )
    lag_max: int | None = gauge("largest age", "batches", tag="gradients/lag_max")
    gradients_lost: float | None = gauge(
        "part of the true gradients whose batch was given up",
        "share",
        column="lost",
        tag="gradients/lost",
    )
    gradients: int | None = counter("true gradients received")
    gradients_unpaired: int | None = counter(
        "of these: received after their batch was given up, or a second time"
    )
    gradients_given_up: int | None = counter(
        "batches given up: their true gradient was late or lost", "batches"
    )
    gradients_skipped: int | None = counter("true gradients ignored because they were not finite")
    updates_skipped: int | None = counter(
        "updates left out because the module's own gradient was not finite"
    )
    gradients_dropped: int | None = counter(
        "gradients not sent upstream because the neighbour was slow or gone"
    )
    window_fill: float | None = gauge(
        "part of the window (`links.window`) in use after a batch is sent",
        "share",
        tag="window/fill",
    )
    in_flight: int | None = gauge(
        "batches not yet acknowledged downstream, on the fullest link", "batches"
    )
    waiting: dict[str, float] = gauge(
        "part of the time that the module waited, by reason",
        "share",
        column="waits",
        tag="waiting/",
        default={},
    )
    waiting_s: dict[str, float] = counter("time that the module waited, by reason", "s", default={})
    cpu_s: float | None = counter("CPU time of the worker", "s")
    cpu: float | None = gauge(
        "CPU time over time; above 1 with several threads", "share", tag="process/cpu"
    )
    memory_bytes: int | None = gauge("resident memory", "bytes", tag="process/memory_bytes")
    memory_peak_bytes: int | None = gauge("largest resident memory so far", "bytes")
    refused: dict[str, int] = counter("messages and connections refused, by reason", default={})
    missed: int | None = counter(
        "batches not sent: downstream was gone, or they were not finite", "batches", column="missed"
    )
    replayed: int | None = counter(
        "batches trained on again: upstream was gone or late", "batches", column="replayed"
    )
    resent: int | None = counter("messages resent to a restarted module downstream")
    duplicates: int | None = counter("messages received again from a restarted module upstream")
    shared_bytes: int | None = counter(
        "sent to the module's other replicas: offers and answers", "bytes"
    )
    gaps: int | None = counter("ids never received: missed upstream, or lost with an attempt")


class TrainLine(TrainingFigures, MetricsLine):
    """A worker has trained for a second or so."""

    kind: Literal["train"]
    interval_s: float = gauge("length of the interval", "s", default=0.0)


class EpochLine(MetricsLine):
    """A training epoch has ended."""

    kind: Literal["epoch"]
    batches: int = gauge(
        "training batches of this epoch acknowledged, each counted once", "batches", default=0
    )


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
    return TrainLine.parse(text) if TRAIN in text else None


def parse_evaluation(text: bytes) -> EvaluationLine | None:
    """Return a line about an evaluation; None if it is another one, or damaged."""
    return None if TRAIN in text else EvaluationLine.parse(text)


def read_metrics(path: Path, kind: type[LineT]) -> Iterator[LineT]:
    """Yield a file's lines of one kind, or of all kinds (``MetricsLine``), one after the other."""
    return (line for line in LineReader(path, parse_line).new() if isinstance(line, kind))
