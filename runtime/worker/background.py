"""Work that a worker repeats in a thread, whatever its computing thread does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeating(name: str, every_s: float, work: Callable[[], None]) -> Iterator[None]:
    """Do some work, which raises nothing, every few seconds in a thread of this name."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
