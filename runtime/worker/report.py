"""The file that shows a worker to the outside, also while its computing thread does nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dni_runtime.errors import StoppedError
from dni_runtime.rundir import peek_json, write_json

REPORT_S = 1.0
"""The report is written this often."""


class ReportWriter:
    """Writes one start's report, until a later start of the module has shown its own.

    Args:
        path: The file.
        module: The module.
        attempt: Which start of it this is.
        document: What to write; called in a thread, too.
        on_error: Called when it could not be written.
    """

    def __init__(
        self,
        path: Path,
        module: str,
        attempt: int,
        document: Callable[[], Mapping[str, Any]],
        on_error: Callable[[OSError], None],
    ) -> None:
        self._path = path
        self._module = module
        self._attempt = attempt
        self._document = document
        self._on_error = on_error
        self._lock = threading.Lock()
        self._shown = self._told = False
        self._later = 0

    @contextlib.contextmanager
    def regularly(self) -> Iterator[None]:
        """Have it written about once a second, whatever the computing thread does."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(REPORT_S):
                self.write()

        thread = threading.Thread(target=work, name="report", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def write(self) -> None:
        """Write it now."""
        with self._lock:
            try:
                later = peek_json(self._path).get("attempt", 0) if self._shown else 0
                self._later = later if later > self._attempt else self._later
                if not self._later:
                    self._shown = True
                    write_json(self._path, dict(self._document()), durable=False)
            except OSError as error:
                self._on_error(error)

    def check(self) -> None:
        """Leave where a later start of the module has taken over.

        Raises:
            StoppedError: It has: this process was cut off, and given up. Raised once.
        """
        if self._later and not self._told:
            self._told = True
            raise StoppedError(f"start {self._later} of module {self._module!r} has taken over")
