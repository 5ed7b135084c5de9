"""A module's file of metrics: ``metrics/MODULE.jsonl``, the whole learning curve.

Beyond ``FULL_BYTES`` the worker thins it out: the older a ``train`` line, the fewer of its
neighbours stay. The file is appended to or replaced as a whole: a worker killed at any point leaves
whole lines, except possibly the last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dni_runtime.files import opened, write_atomic
from dni_runtime.run.documents.metrics import MetricsLine, parse_train

FULL_BYTES = 8 << 20
"""Size at which a file of metrics is thinned out: about four hours of lines."""

DETAIL = 1000
"""A ``train`` line stays if the one before is older by a thousandth of its age."""


class MetricsFile:
    """Appends one module's lines."""

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
