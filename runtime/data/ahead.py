"""Reading batches ahead of the one in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

AHEAD = 4
"""Batches that are read ahead of the one in use."""

T = TypeVar("T")


def in_thread(batches: Iterator[T], depth: int = AHEAD) -> Generator[T, None, None]:
    """The same batches, up to ``depth`` of them made ahead by a thread that ends with this.

    What making a batch raises is raised where that batch is asked for.
    """
    ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def fill() -> None:
        try:
            for batch in batches:
                if stop.is_set():
                    return
                ready.put((batch,))
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=fill, name="dni-data", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        stop.set()
        # The thread puts at most one more thing after `stop`, for which this makes room.
        while not ready.empty():
            ready.get_nowait()
        thread.join(timeout=10)
