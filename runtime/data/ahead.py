"""Making batches ahead of the one in use, in a thread or in separate processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from dni_runtime.errors import DniError, WorkerError

_PR_SET_PDEATHSIG = 1

AHEAD = 4
"""Number of batches that are read ahead."""

LEAVE_S = 2.0
"""Seconds for processes that are no longer needed to exit before they are killed."""

T = TypeVar("T")


def in_thread(batches: Iterator[T], depth: int = AHEAD) -> Generator[T, None, None]:
    """Yield the same batches, up to ``depth`` of them made ahead by a thread.

    The thread ends with the generator. An error in making a batch is raised when that batch is due.
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
        # Make room for the one item that the thread may still put after `stop`.
        while not ready.empty():
            ready.get_nowait()
        thread.join(timeout=10)


def in_processes(
    make: Callable[[int], T], numbers: range, processes: int, *, seed: int
) -> Generator[T, None, None]:
    """Yield the result of ``make`` for each number, in their order, made ahead by processes.

    They are forks of this one and end with it, or with the generator. Results are tensors, or
    tuples of them; errors of ``make`` are raised when its result is due. The seed is for the global
    random generators of each process. Must be used in the main thread.
    """
    if not numbers:
        return
    loader: DataLoader[Any] = DataLoader(
        _Made(make),
        batch_size=None,
        sampler=numbers,
        num_workers=min(processes, len(numbers)),
        collate_fn=lambda result: result,
        worker_init_fn=_Follower(os.getpid()),
        multiprocessing_context="fork",
        generator=torch.Generator().manual_seed(seed),
    )
    before = set(multiprocessing.active_children())
    # torch's handler would raise anywhere in this thread when a process dies.
    handler = signal.getsignal(signal.SIGCHLD)
    results = iter(loader)
    signal.signal(signal.SIGCHLD, handler)
    started = set(multiprocessing.active_children()) - before
    try:
        for _ in numbers:
            try:
                result = next(results)
            except (RuntimeError, OSError, EOFError) as error:  # the last two: of its socket
                if isinstance(error, RuntimeError) and all(one.is_alive() for one in started):
                    raise
                raise WorkerError(
                    f"a process that makes batches ahead has died: {error}",
                    hint="is there enough memory? each of the data.workers needs its own",
                ) from None
            if isinstance(result, DniError):
                raise result
            yield result
    finally:
        killer = threading.Timer(LEAVE_S, _kill, [started])
        killer.start()
        del results  # stops them, and waits for one after the other
        killer.cancel()
        killer.join()
        _kill(started)


def _kill(processes: Iterable[BaseProcess]) -> None:
    for one in processes:
        one.kill()
        one.join()


class _Made(Dataset[Any]):
    """The results of a function, as a data set."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __getitem__(self, number: int) -> Any:
        try:
            return self._make(number)
        except DniError as error:  # if raised, torch would add a traceback to its message
            return error


class _Follower:
    """Set-up of a new process: ignore signals, and end only with the parent.

    Stopping the head may signal all of its processes, as Slurm does, but the head needs batches
    until it reaches a marker to stop at.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self, number: int) -> None:
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(one, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self._parent:  # it died before prctl
            os._exit(1)
