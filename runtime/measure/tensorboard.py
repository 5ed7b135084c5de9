"""A run's metrics as TensorBoard's event files, made beside the workers, not by them.

Each :class:`Board` writes event files of its own, one per module: nothing that is written is
changed, and one that was cut off is left behind. ``written.json`` beside them tells up to which
line. Needs the package ``tensorboard``, but neither TensorFlow nor torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.files import locked
from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.figures import figures_of
from dni_runtime.run.documents.metrics import EvaluationLine, MetricsLine, parse_line
from dni_runtime.run.lines import LineReader
from dni_runtime.run.record import Record
from dni_runtime.spec.replicas import tails_of


def scalars(line: MetricsLine, *, early: bool) -> dict[str, float]:
    """Return the points of one line of metrics, by tag; what is null has none."""
    points: dict[str, float | None] = {}
    if isinstance(line, EvaluationLine):
        prefix = f"{line.kind}/" if not early else "head/" if line.kind == "eval" else "head/test_"
        points = {f"{prefix}{name}": value for name, value in line.figures.items()}
    for figure in figures_of(type(line)):
        value = getattr(line, figure.name)
        if figure.tag and isinstance(value, dict):
            points |= {f"{figure.tag}{reason}": part for reason, part in value.items()}
        elif figure.tag:
            points[figure.tag] = value
    return {tag: float(value) for tag, value in points.items() if value is not None}


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Refuse to write where another process does: TensorBoard reads on in the newest file only."""
    with contextlib.ExitStack() as stack:
        with _naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            raise UsageError(
                f"another process writes event files into {str(folder)!r}",
                hint="'dnictl tensorboard --follow' adds all that is new: one is enough",
            ) from None
        except OSError:  # the file system has no locks
            pass
        yield


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"event files cannot be written into {str(folder)!r}: {error.strerror}",
            hint="name another folder with --logdir",
        ) from None


class Board:
    """The event files of a run, a folder per module."""

    def __init__(self, record: Record, folder: Path) -> None:
        self.folder = folder
        self._metrics = record.run.metrics("x").parent
        self._created = record.created
        self._early = frozenset(record.modules).difference(tails_of(record.modules))
        self._proto = _Proto()
        self._modules: dict[str, _ModuleEvents] = {}

    def update(self) -> dict[str, int]:
        """Add what is new; return how many events were added, by module."""
        for path in sorted(self._metrics.glob("*.jsonl")):
            name = path.stem
            if name not in self._modules:
                self._modules[name] = _ModuleEvents(
                    path,
                    self.folder / name,
                    self._proto,
                    created=self._created,
                    early=name in self._early,
                )
        with _naming(self.folder):
            return {name: events.update() for name, events in self._modules.items()}


class _Proto:
    """The parts of the package ``tensorboard`` that are used; it has no types."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UnavailableError(
                f"event files need the package 'tensorboard': {error}",
                hint="pip install 'dni-runtime[tensorboard]'",
            ) from None
        self.event: Any = Event
        self.start: Any = SessionLog(status=SessionLog.START)
        self.writer: Any = RecordWriter


class _EventState(Document):
    """Which lines have events."""

    created: float = 0.0  # when their run was created: a later one may have the same name
    attempt: int = 0  # of the newest line
    time: float = 0.0  # the newest
    step: int = -1  # the largest


class _ModuleEvents:
    def __init__(
        self, metrics: Path, folder: Path, proto: _Proto, *, created: float, early: bool
    ) -> None:
        self._lines = LineReader(metrics, parse_line)
        self._folder = folder
        self._proto = proto
        self._early = early
        self._position = folder / "written.json"
        self._file: Path | None = None
        known = _EventState.peek(self._position)
        self._written = (
            known if known and known.created == created else _EventState(created=created)
        )

    def update(self) -> int:
        """Add an event for each line with figures that has none; return how many."""
        done = self._written
        new = [
            (line, points)
            for line in self._lines.new()
            # The clocks of a module's hosts may differ, and a resumed run repeats steps.
            if (line.time > done.time or line.step > done.step)
            and (points := scalars(line, early=self._early))
        ]
        if new:
            self._write(new)
            self._written = _EventState(
                created=done.created,
                attempt=new[-1][0].attempt,
                time=max(done.time, *(line.time for line, _ in new)),
                step=max(done.step, *(line.step for line, _ in new)),
            )
            self._written.write(self._position, durable=False)
        return len(new)

    def _write(self, new: list[tuple[MetricsLine, dict[str, float]]]) -> None:
        begins = self._file is None
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads what has ``tfevents`` in its name, in the order of the names.
            self._file = self._folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        attempt = self._written.attempt
        with self._file.open("ab") as file:
            writer = self._proto.writer(file)

            def add(**fields: Any) -> None:
                writer.write(self._proto.event(**fields).SerializeToString())

            if begins:
                add(wall_time=time.time(), file_version="brain.Event:2")
            for line, points in new:
                if line.attempt != attempt:
                    # TensorBoard drops the points from this step on: a resumed run repeats them,
                    # and all are of another run if this one has none yet.
                    step = line.step if attempt else 0
                    add(wall_time=line.time, step=step, session_log=self._proto.start)
                    attempt = line.attempt
                values = [{"tag": tag, "simple_value": value} for tag, value in points.items()]
                add(wall_time=line.time, step=line.step, summary={"value": values})
