"""A worker's files: its report, about once a second whatever it computes, and its metrics."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from dni_runtime.errors import StoppedError
from dni_runtime.files import opened, write_atomic
from dni_runtime.run.documents.metrics import MetricsLine, parse_train
from dni_runtime.run.documents.reports import Report
from dni_runtime.worker.background import repeating

FULL_BYTES = 8 << 20
"""Size at which a file of metrics is thinned out: about four hours of lines."""

DETAIL = 1000
"""A ``train`` line stays if the one before is older by a thousandth of its age."""


class MetricsFile:
    """A module's file of metrics: ``metrics/MODULE.jsonl``, the whole learning curve.

    Beyond ``FULL_BYTES`` the worker thins it out: the older a ``train`` line, the fewer of its
    neighbours stay. The file is appended to or replaced as a whole: a worker killed at any point
    leaves whole lines, except possibly the last one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._limit_bytes = FULL_BYTES

    def append(self, line: MetricsLine) -> None:
        """Add a line; ``OSError`` if the disk is full or unavailable."""
        size_bytes = line.append(self._path)
        if size_bytes >= self._limit_bytes:
            # If it stays as large (evaluations, or no room for another file), it may grow first.
            self._limit_bytes = size_bytes + FULL_BYTES // 2
            with opened(self._path) as file:
                kept = thinned(file.readlines(), line.time)
            write_atomic(self._path, b"".join(kept))
            size_bytes = sum(map(len, kept))
            self._limit_bytes = max(FULL_BYTES, size_bytes + FULL_BYTES // 2)


def thinned(lines: Iterable[bytes], now: float) -> list[bytes]:
    """Leave out ``train`` lines, the more the older they are: see ``DETAIL``."""
    kept, last = [], 0.0
    for text in lines:
        line = parse_train(text)
        if line is None or abs(line.time - last) >= (now - line.time) / DETAIL:
            kept.append(text)
            last = last if line is None else line.time
    return kept


REPORT_S = 1.0
"""Seconds between two writes of the report."""


class ReportWriter:
    """Writes one attempt's report, until a later attempt of the module has written its own."""

    def __init__(
        self,
        path: Path,
        module: str,
        attempt: int,
        report: Callable[[], Report],  # also called in a thread
        on_error: Callable[[OSError], None],
    ) -> None:
        self._path = path
        self._module = module
        self._attempt = attempt
        self._report = report
        self._on_error = on_error
        self._lock = threading.Lock()
        self._shown = self._told = False
        self._later = 0

    def regularly(self) -> contextlib.AbstractContextManager[None]:
        """Write it about once a second, whatever the computing thread does."""
        return repeating("report", REPORT_S, self.write)

    def write(self) -> None:
        with self._lock:
            try:
                later = Report.read(self._path).attempt if self._shown else 0
                self._later = later if later > self._attempt else self._later
                if not self._later:
                    self._shown = True
                    self._report().write(self._path, durable=False)
            except OSError as error:
                self._on_error(error)

    def check(self) -> None:
        """Raise ``StoppedError``, once, if a later attempt has taken over."""
        if self._later and not self._told:
            self._told = True
            raise StoppedError(f"attempt {self._later} of module {self._module!r} has taken over")
