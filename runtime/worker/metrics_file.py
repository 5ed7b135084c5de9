"""A worker's files of metrics: small in long runs, and complete for the newest lines.

``metrics/MODULE.jsonl`` is the whole learning curve, and only grows. Beyond ``FULL_BYTES`` it gets
one ``train`` line a minute, besides all lines of other kinds. From then on all lines also go to
``metrics/recent/MODULE.jsonl``; at ``FULL_BYTES`` that is renamed to ``MODULE.jsonl.1``, in place
of the previous one. Files are appended to or renamed, never rewritten: a worker killed at any
point leaves whole files.
"""

from __future__ import annotations

import os
import time

from dni_runtime.documents.metrics import MetricsLine, parse_train
from dni_runtime.lines import last_line
from dni_runtime.rundir import RunDir

FULL_BYTES = 8 << 20
"""About four hours of lines."""

KEPT_S = 60.0
"""Seconds between ``train`` lines in the learning curve beyond that."""


class MetricsFile:
    """Appends one module's lines."""

    def __init__(self, run: RunDir, module: str) -> None:
        self._whole, self._recent = run.metrics(module), run.recent_metrics(module)
        self._whole_bytes: int | None = None
        self._recent_bytes = 0
        self._due_s = 0.0

    def append(self, line: MetricsLine) -> None:
        """Add a line; ``OSError`` if the disk is full or unavailable."""
        if self._whole_bytes is None:
            self._whole_bytes = self._go_on()
        train, full = line.kind == "train", self._whole_bytes >= FULL_BYTES
        if not (train and full) or time.monotonic() >= self._due_s:
            self._whole_bytes = line.append(self._whole)
            if train:
                self._due_s = time.monotonic() + KEPT_S
        if full:
            if train and self._recent_bytes >= FULL_BYTES:  # so that the new file has a train line
                os.replace(self._recent, self._recent.with_name(f"{self._recent.name}.1"))
            self._recent_bytes = line.append(self._recent)

    def _go_on(self) -> int:
        """Keep the last line of an earlier attempt, as its counters are sums; return the size."""
        newest, kept = last_line(self._recent, parse_train), last_line(self._whole, parse_train)
        if newest is not None and (kept is None or kept.time < newest.time):
            newest.append(self._whole)
        return self._whole.stat().st_size if self._whole.exists() else 0
