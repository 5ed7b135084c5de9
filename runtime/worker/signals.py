"""Stop signals: the first asks for a checkpoint and a clean exit, the next one kills."""

from __future__ import annotations

import os
import signal
import socket
import time
from types import FrameType


class StopRequest:
    """Remembers the first SIGTERM or SIGINT; the second ends the process at once.

    SIGUSR1 asks for the same of this module alone, which will be restarted. SIGUSR2 ends the
    process at once.

    Args:
        patient: Ignore repeated signals (a step of Slurm gets each one twice).

    Attributes:
        alone: Whether the other modules continue.
        wakeup: A file descriptor that becomes readable when a signal comes (a library may restart
            a poll that a signal has interrupted: signal(7)).
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patient = patient
        self._at_s: float | None = None
        self.alone = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.wakeup = self._read.fileno()

    def install(self) -> None:
        """Install the handlers; only in the main thread."""
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGUSR1, self._handle_restart)
        signal.signal(signal.SIGUSR2, self._leave)

    @staticmethod
    def ignore() -> None:
        """Ignore further signals: Python's own handling ends before the process does."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    def __call__(self) -> bool:
        """Whether the worker has been told to stop."""
        return self._at_s is not None

    @property
    def age_s(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return 0.0 if self._at_s is None else time.monotonic() - self._at_s

    def drain(self) -> None:
        """Empty the wake-up descriptor."""
        try:
            while self._read.recv(64):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptors."""
        self._read.close()
        self._write.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._at_s is not None and not self.alone:
            if self._patient:
                return
            self._leave(number, frame)
        self.alone = False
        self._at_s = time.monotonic()

    @staticmethod
    def _leave(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    def _handle_restart(self, number: int, frame: FrameType | None) -> None:
        if self._at_s is None:
            self.alone = True
            self._at_s = time.monotonic()
