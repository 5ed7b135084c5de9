"""What a worker tells about itself, and what its supervisor tells it.

A file that is missing, or not readable now, is an empty document (all defaults).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from dni_runtime.documents.base import Document
from dni_runtime.documents.metrics import Evaluation
from dni_runtime.files import overwrite_json

WorkerPhase = Literal[
    "new", "starting", "connecting", "joining", "running", "stopping", "restarting",
    "finished", "stopped", "failed", "parked",
]  # fmt: skip
Wanted = Literal["run", "stop", "restart"]
ENDED: frozenset[str] = frozenset({"finished", "stopped", "failed", "parked"})
"""Phases of workers and runs that have ended; ``parked``: a replica that takes no batches."""


class Diverged(Document):
    """A value that was not finite (``worker/divergence.py``).

    Attributes:
        batch: Its position in the stream.
        what: What was not finite.
        times: How often anything was not finite so far.
    """

    batch: int
    what: str
    times: int


class _OfWorker(Document):
    attempt: int = 0

    def __bool__(self) -> bool:
        return self.attempt > 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file as it is now; see the module's description."""
        found = cls.peek(path)
        return cls() if found is None else found

    def of(self, attempt: int) -> Self:
        """Return the document if it is of this attempt, else an empty one."""
        return self if self.attempt == attempt else type(self)()


class Report(_OfWorker):
    """A worker's report (docs/metrics.md); false if it is empty.

    Attributes:
        attempt: Number of the module's start; from 1.
        module: The module.
        pid: The worker's process id.
        born: Start time of that process (``documents.state``).
        host: Its host.
        state: Its phase.
        time: Unix time of the report, by its host's clock.
        id: Position in the stream.
        epoch: The newest epoch.
        step: Training batches so far.
        samples: Training samples so far.
        doing: What its computing thread does or waits for (``launch/stall.py``).
        doing_s: Seconds since that began.
        saving: Bytes that it has saved so far while it saves its state; None: it does not.
        connected: Whether the links downstream are open; None for the tail.
        in_flight: Unacknowledged messages there.
        evaluation: Its newest evaluation.
        error: The error that ended it.
        exit_code: The exit code that follows from it.
        warning: The newest problem that did not end it.
        diverged: The newest value that was not finite.
    """

    module: str = ""
    pid: int | None = None
    born: int | None = None
    host: str | None = None
    state: WorkerPhase = "starting"
    time: float = 0.0
    id: int = 0
    epoch: int | None = None
    step: int | None = None
    samples: int | None = None
    doing: str = ""
    doing_s: float = 0.0
    saving: int | None = None
    connected: bool | None = None
    in_flight: int = 0
    evaluation: Evaluation | None = None
    error: str | None = None
    exit_code: int | None = None
    warning: str | None = None
    diverged: Diverged | None = None


class Endpoint(_OfWorker):
    """Where a worker listens.

    Attributes:
        attempt: Number of the module's start; from 1.
        module: The module.
        address: Where it listens for the first of the modules upstream; None: not known.
        further: Where it listens for each of the others, by name.
        public_key: Its public key, if links are encrypted.
        pid: The worker's process id.
        host: Its host.
        time: Unix time of the record.
    """

    module: str = ""
    address: str | None = None
    further: dict[str, str] = Field(default_factory=dict)
    public_key: str | None = None
    pid: int | None = None
    host: str | None = None
    time: float = 0.0


class Control(_OfWorker):
    """What the supervisor wants of a worker.

    Attributes:
        attempt: Number of the module's start that it is for; from 1.
        wanted: ``stop``: exit after a checkpoint, as all modules do; ``restart``: do so while the
            others continue.
    """

    wanted: Wanted = "run"

    def write(self, path: Path, *, durable: bool = False) -> None:
        overwrite_json(path, self.model_dump())
