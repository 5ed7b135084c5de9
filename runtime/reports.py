"""What a worker tells about itself, and what its supervisor tells it.

One schema for the writer and for all readers. What another version wrote is read as far as it is
known; a file that is missing, or not readable now, is an empty document (all defaults).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dni_runtime.rundir import overwrite_json, peek_json, write_json

WorkerPhase = Literal[
    "new", "starting", "connecting", "running", "stopping", "restarting",
    "finished", "stopped", "failed",
]  # fmt: skip
Wanted = Literal["run", "stop", "restart"]
ENDED: frozenset[str] = frozenset({"finished", "stopped", "failed"})  # phases of workers and runs


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    attempt: int = 0

    def __bool__(self) -> bool:
        return self.attempt > 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file as it is now; see the module's description."""
        try:
            return cls.model_validate(peek_json(path))
        except ValidationError:
            return cls()

    def of(self, attempt: int) -> Self:
        """Return the document if it is of this attempt, else an empty one."""
        return self if self.attempt == attempt else type(self)()

    def write(self, path: Path, *, durable: bool = True) -> None:
        """Write the file.

        Raises:
            OSError: It cannot be written.
        """
        write_json(path, self.model_dump(), durable=durable)


class Report(_Document):
    """A worker's report (docs/metrics.md); false if it is empty.

    Attributes:
        attempt: Number of the module's start; from 1.
        module: The module.
        pid: The worker's process id.
        host: Its host.
        state: Its phase.
        time: Unix time of the report, by its host's clock.
        id: Position in the stream.
        epoch: The newest epoch.
        step: Training batches so far.
        samples: Training samples so far.
        doing: What its computing thread does or waits for (``launch/stall.py``).
        doing_s: Seconds since that began.
        connected: Whether the links downstream are open; None for the tail.
        in_flight: Unacknowledged messages there.
        evaluation: Its newest evaluation.
        error: The error that ended it.
        exit_code: The exit code that follows from it.
        warning: The newest problem that did not end it.
        diverged: What was not finite (``worker/divergence.py``).
    """

    module: str = ""
    pid: int | None = None
    host: str | None = None
    state: WorkerPhase = "starting"
    time: float = 0.0
    id: int = 0
    epoch: int | None = None
    step: int | None = None
    samples: int | None = None
    doing: str = ""
    doing_s: float = 0.0
    connected: bool | None = None
    in_flight: int = 0
    evaluation: dict[str, Any] | None = None
    error: str | None = None
    exit_code: int | None = None
    warning: str | None = None
    diverged: dict[str, Any] | None = None


class Endpoint(_Document):
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
    further: dict[str, str] = {}
    public_key: str | None = None
    pid: int | None = None
    host: str | None = None
    time: float = 0.0


class Control(_Document):
    """What the supervisor wants of a worker.

    Attributes:
        attempt: Number of the module's start that it is for; from 1.
        wanted: ``stop``: exit after a checkpoint, as all modules do; ``restart``: do so while the
            others continue.
    """

    wanted: Wanted = "run"

    def write(self, path: Path, *, durable: bool = False) -> None:
        overwrite_json(path, self.model_dump())
