"""Requests to stop: from the worker's supervisor by a document, from others by a signal.

The worker reads the document again and again: so it is told in the same way on this host, by ssh
and by Slurm, in a container or not, and to read it again changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType

from dni_runtime.run.documents.reports import Control
from dni_runtime.worker.background import repeating

LOOK_S = 0.5
"""Seconds between two looks at what the supervisor wants."""

HEAD_LOOK_S = 0.1
"""The same for a head: when all are to stop, they do so at its marker."""

REPEAT_S = 1.0
"""Seconds in which signals count as one: a step of Slurm gets each from Slurm, which signals all
processes of a step, and from Apptainer's starter, which passes it on; so do launchers of MPI."""


class StopRequest:
    """Remembers the first request; a second SIGTERM or SIGINT ends the process at once.

    Signals within ``REPEAT_S`` of the first count as one.
    """

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._signalled_s: float | None = None
        self.alone = False  # the other modules continue
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        # a file descriptor that becomes readable when a request comes (a library may restart a poll
        # that a signal has interrupted: signal(7))
        self.wakeup = self._read.fileno()

    def install(self) -> None:
        """Install the handlers; only in the main thread."""
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    @staticmethod
    def ignore() -> None:
        """Ignore further signals: Python's own handling ends before the process does."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def __call__(self) -> bool:
        """Whether the worker has been told to stop."""
        return self._at_s is not None

    @property
    def age_s(self) -> float:
        """Seconds since the first request; 0 before it."""
        return 0.0 if self._at_s is None else time.monotonic() - self._at_s

    def stop(self, *, alone: bool = False) -> None:
        """Ask for a checkpoint and a clean exit, also of a module that was to exit alone."""
        if self._at_s is None or (self.alone and not alone):
            self.alone = alone
            self._at_s = time.monotonic()
            self.wake()

    def obeying(
        self, path: Path, attempt: int, *, head: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Do what the supervisor wants, in a thread.

        Its document is there before the worker is started: NFS may deny for a while that there is a
        new file.
        """

        def look() -> None:
            order = Control.read(path).of(attempt).order
            if order != "run":
                self.stop(alone=order == "restart")

        look()
        return repeating("control", HEAD_LOOK_S if head else LOOK_S, look)

    def drain(self) -> None:
        """Empty the wake-up descriptor."""
        try:
            while self._read.recv(64):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._read.close()
        self._write.close()

    def wake(self) -> None:
        """Make the wake-up descriptor readable; from any thread."""
        with contextlib.suppress(BlockingIOError):
            self._write.send(b"!")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signalled_s is None:
            self._signalled_s = time.monotonic()
        elif time.monotonic() - self._signalled_s > REPEAT_S:
            os._exit(128 + number)
        self.stop()
