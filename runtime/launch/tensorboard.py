"""A run's metrics as TensorBoard's event files, made beside the workers, not by them.

One event file per module, one event per line of its metrics. So the file itself tells how far it
is: to go on, lines that have their event are left out. Needs the package ``tensorboard``, but
neither TensorFlow nor torch.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from dni_runtime.documents.metrics import EvaluationLine, MetricsLine, TrainLine, parse_line
from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.launch.records import Record
from dni_runtime.lines import LineReader

FILE = "events.out.tfevents.0.dnictl"
"""TensorBoard reads what has ``tfevents`` in its name, and follows files that grow."""

TRAIN_TAGS = {
    "loss": "train/loss",
    "samples_per_s": "train/samples_per_s",
    "batches_per_s": "train/batches_per_s",
    "head_accuracy": "head/train_accuracy",
    "synthesizer_error": "synthesizer/error",
    "synthesizer_cosine": "synthesizer/cosine",
    "lag": "gradients/age",
    "lag_max": "gradients/age_max",
    "gradients_lost": "gradients/lost",
    "window_fill": "window/fill",
    "cpu": "process/cpu",
    "memory_bytes": "process/memory_bytes",
}
"""Tags of the fields of ``train`` lines (docs/metrics.md)."""

_FRAME = struct.Struct("<QI")
_CRC_BYTES = 4


def scalars(line: MetricsLine, *, early: bool) -> dict[str, float]:
    """The points of one line of metrics, by tag; what is null has none.

    ``early``: its module is not the tail, so that evaluations are of an early head.
    """
    found: dict[str, float | None] = {}
    if isinstance(line, EvaluationLine):
        prefix = f"{line.kind}/" if not early else "head/" if line.kind == "eval" else "head/test_"
        found = {f"{prefix}{name}": value for name, value in line.figures.items()}
    elif isinstance(line, TrainLine):
        found = {tag: getattr(line, name) for name, tag in TRAIN_TAGS.items()}
        found |= {f"waiting/{reason}": share for reason, share in line.waiting.items()}
    return {tag: float(value) for tag, value in found.items() if value is not None}


class Board:
    """The event files of a run, a folder per module."""

    def __init__(self, record: Record, folder: Path) -> None:
        self.folder = folder
        self._metrics = record.run.metrics("x").parent
        self._early = frozenset(record.modules[:-1])
        self._proto = _Proto()
        self._files: dict[str, _EventFile] = {}

    def update(self) -> dict[str, int]:
        """Add what is new; return how many events were added, by module."""
        for path in sorted(self._metrics.glob("*.jsonl")):
            if path.stem not in self._files:
                self._files[path.stem] = _EventFile(
                    path, self.folder / path.stem, self._proto, early=path.stem in self._early
                )
        try:
            return {name: file.update() for name, file in self._files.items()}
        except OSError as error:
            raise UsageError(
                f"event files cannot be written into {str(self.folder)!r}: {error.strerror}",
                hint="name another folder with --logdir",
            ) from None


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
        self.start: Any = SessionLog.START
        self.writer: Any = RecordWriter


class _EventFile:
    """The event file of one module."""

    def __init__(self, metrics: Path, folder: Path, proto: _Proto, *, early: bool) -> None:
        self._metrics = metrics
        self._path = folder / FILE
        self._proto = proto
        self._early = early
        self._reader = LineReader(metrics, parse_line)
        self._size = -1
        self._attempt: int | None = None

    def update(self) -> int:
        """Add an event for each line that has none; returns how many."""
        if _size_of(self._path) != self._size:  # nothing is there, or somebody else writes it, too
            self._pass_over()
        lines = self._reader.new()
        first = next(lines, None)
        if first is None:
            return 0
        with self._path.open("ab") as file:
            count = self._write(file, chain([first], lines))
        self._size = _size_of(self._path)
        return count

    def _pass_over(self) -> None:
        """Pass over the lines that have events; cuts off one that was not written to its end."""
        done, end_bytes, last_time = 0, 0, 0.0
        for end, event in self._events():
            end_bytes = end
            if event.HasField("summary"):
                done, last_time = done + 1, event.wall_time
        self._reader, self._attempt = LineReader(self._metrics, parse_line), None
        line = None
        for line in islice(self._reader.new(), done):
            self._attempt = line.attempt
        if done and (line is None or line.time != last_time):
            self._reader, self._attempt = LineReader(self._metrics, parse_line), None
            end_bytes = 0  # of another run with the same name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        os.truncate(self._path, end_bytes)
        if not end_bytes:
            with self._path.open("ab") as file:
                first = self._proto.event(wall_time=time.time(), file_version="brain.Event:2")
                self._proto.writer(file).write(first.SerializeToString())
        self._size = _size_of(self._path)

    def _write(self, file: BinaryIO, lines: Iterable[MetricsLine]) -> int:
        writer, count = self._proto.writer(file), 0
        for line in lines:
            count += 1
            when, step = line.time, line.step
            if line.attempt != self._attempt:
                # A resumed run goes over some ground again: what was there is taken back.
                self._attempt = line.attempt
                event = self._proto.event(wall_time=when, step=step)
                event.session_log.status = self._proto.start
                writer.write(event.SerializeToString())
            event = self._proto.event(wall_time=when, step=step)
            event.summary.SetInParent()
            for tag, value in scalars(line, early=self._early).items():
                event.summary.value.add(tag=tag, simple_value=value)
            writer.write(event.SerializeToString())
        return count

    def _events(self) -> Iterator[tuple[int, Any]]:
        """The whole events that are there, and where each ends."""
        end = 0
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            while len(head := file.read(_FRAME.size)) == _FRAME.size:
                size, _ = _FRAME.unpack(head)
                body = file.read(size + _CRC_BYTES)
                if len(body) < size + _CRC_BYTES:
                    return
                end += len(head) + len(body)
                yield end, self._proto.event.FromString(body[:size])


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
