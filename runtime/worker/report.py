"""Writing a worker's report: about once a second, also if the computing thread is blocked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from dni_runtime.errors import StoppedError
from dni_runtime.run.documents.reports import Report
from dni_runtime.worker.background import repeating

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
        """Write it now."""
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
        """Raise ``StoppedError``, once, if a later attempt has taken over.

        That happens if this process was out of reach.
        """
        if self._later and not self._told:
            self._told = True
            raise StoppedError(f"attempt {self._later} of module {self._module!r} has taken over")
