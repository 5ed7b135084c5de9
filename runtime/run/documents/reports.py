"""What a worker tells about itself, and what its supervisor tells it.

A file that is missing, or not readable now, is an empty document (all defaults).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from dni_runtime.files import overwrite_json
from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.metrics import Evaluation, TrainLine

WorkerPhase = Literal[
    "new", "starting", "connecting", "running", "stopping", "restarting",
    "finished", "stopped", "failed", "inactive",
]  # fmt: skip
Order = Literal["run", "stop", "restart"]
ENDED: frozenset[str] = frozenset({"finished", "stopped", "failed", "inactive"})
"""Phases of workers and runs that have ended; ``inactive``: a replica without a worker now."""


class DivergedValue(Document):
    """A value that was not finite (``worker/divergence.py``)."""

    batch: int  # its position in the stream
    what: str  # was not finite
    times: int  # how often anything was not finite so far


class _OfWorker(Document):
    attempt: int = 0  # number of the module's start, from 1

    def __bool__(self) -> bool:
        return self.attempt > 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file as it is now; see the module's description."""
        report = cls.peek(path)
        return cls() if report is None else report

    def of(self, attempt: int) -> Self:
        """Return the document if it is of this attempt, else an empty one."""
        return self if self.attempt == attempt else type(self)()


class ChainStart(Document):
    """The start of the whole chain that a worker was started in, if nobody supervises it."""

    number: int  # which start it is: the launcher's word for it
    first: int  # the worker's first attempt in it
    cut: int | None = None  # where that began; None: it has not


class Report(_OfWorker):
    """A worker's report (docs/metrics.md); false if it is empty."""

    module: str = ""
    pid: int | None = None
    born: int | None = None  # start time of the process (``documents.state``)
    host: str | None = None
    state: WorkerPhase = "starting"
    time: float = 0.0  # Unix time, by the clock of its host
    id: int = 0  # position in the stream
    epoch: int | None = None  # the newest
    step: int | None = None  # training batches so far
    samples: int | None = None  # training samples so far
    doing: str = "start"  # what its computing thread does or waits for (``supervise/stall.py``)
    doing_s: float = 0.0  # since that began
    saving: int | None = None  # bytes saved so far, while it saves its state; None: it does not
    connected: bool | None = None  # the links downstream are open; None: the tail
    in_flight: int = 0  # unacknowledged messages downstream
    evaluation: Evaluation | None = None  # the newest
    train: TrainLine | None = None  # the newest
    batches_per_s: float | None = None  # over the attempt, from its first such line on
    samples_per_s: float | None = None
    error: str | None = None  # that ended it
    exit_code: int | None = None  # that follows from the error
    warning: str | None = None  # newest problem that did not end it
    diverged: DivergedValue | None = None  # the newest
    chain_start: ChainStart | None = None  # None: a supervisor knows, or all workers end together


class Endpoint(_OfWorker):
    """Where a worker listens."""

    module: str = ""
    address: str | None = None  # of its first link from upstream; None: not known
    further: dict[str, str] = Field(default_factory=dict)  # of the other links, by number
    public_key: str | None = None  # if links are encrypted
    pid: int | None = None
    host: str | None = None
    time: float = 0.0  # Unix time


class Control(_OfWorker):
    """What the supervisor wants of a worker."""

    # ``stop``: exit after a checkpoint, as all modules do; ``restart``: do so while the others
    # continue.
    order: Order = "run"

    def write(self, path: Path, *, durable: bool = False) -> None:
        overwrite_json(path, self.model_dump())
