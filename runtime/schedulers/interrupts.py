"""The signals that stop a supervisor."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def catching_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call ``note`` with the number of each signal; only the main thread can catch signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        note(number)

    # Signals that the caller ignores stay ignored (nohup, background jobs of a shell script).
    caught = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handle) for signum in caught}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
