"""Time, processes and chance of a simulated cluster: one thread, one seed, no waiting.

Every process of a simulation is a set of tasks (greenlets). A task runs until it waits; then
whatever comes next in simulated time runs. Nothing else decides about the order: a seed replays.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

CALL_S = 1e-5
"""What a call takes that need not wait: who asks again and again sees time pass."""

Ready = Callable[[], bool]


class Killed(BaseException):
    """SIGKILL: nothing of the process runs after it, as far as anybody can see."""


class Process:
    """A process of the simulation, by default on a host of its own."""

    def __init__(self, name: str, host: object = None) -> None:
        self.name = name
        self.host = host or self
        self.alive = True
        self.thaws_s = 0.0  # SIGSTOP, or a file system that does not answer
        self.full_until_s = 0.0
        self.slow_until_s = 0.0  # what it writes durably is on disk then, and not before
        self.signalled = False  # a signal has come that its poll has not seen
        self.tasks: list[Task] = []
        self.at_end: list[Callable[[], None]] = []  # called when it is gone, however it ended


class Task:
    """Something that runs in a process, until it waits."""

    def __init__(self, process: Process, run: Callable[[], None], hub: greenlet) -> None:
        self.process = process
        self.greenlet = greenlet(run, parent=hub)
        self.ready: Ready | None = None
        self.turn = 0


class World:
    """The simulation's clock and its events.

    ``random`` is the only source of chance; ``current`` is the task that runs, or None while the
    world itself decides.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.current: Task | None = None
        self._hub = getcurrent()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._number), action))

    def spawn(self, process: Process, run: Callable[[], Any]) -> Task:
        """Begin a task now."""

        def body() -> None:
            with contextlib.suppress(Killed):
                run()

        task = Task(process, body, self._hub)
        process.tasks.append(task)
        self.at(0.0, lambda: self._switch(task))
        return task

    def wait(self, timeout_s: float | None, ready: Ready | None = None) -> None:
        """Let others run until the time is over, or ``ready`` holds after a :meth:`wake`."""
        task = self.current
        assert task is not None, "only tasks wait"
        self.check_alive()
        task.turn += 1
        if ready is not None and ready():
            timeout_s = 0.0
        task.ready = ready
        if timeout_s is not None:
            self._resume_at(task, max(timeout_s, CALL_S))
        self.current = None
        self._hub.switch()
        self.check_alive()

    def wake(self, process: Process) -> None:
        """Something has happened that tasks of a process may wait for."""
        for task in process.tasks:
            if task.ready is not None and task.ready():
                self._resume_at(task, 0.0)

    def check_alive(self) -> None:
        """Raise :class:`Killed` in a process that has been."""
        if self.current is not None and not self.current.process.alive:
            raise Killed

    def kill(self, process: Process) -> None:
        """End a process at once."""
        if not process.alive:
            return
        process.alive = False
        for task in process.tasks:
            self.at(0.0, lambda task=task: self._switch(task))  # type: ignore[misc]
        for action in process.at_end:
            action()

    def run(self, over: Ready, limit_s: float) -> bool:
        """Let time pass until ``over`` holds; return whether it did before the limit."""
        while not over():
            if not self._events or self._events[0][0] > limit_s:
                return False
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        return True

    def _resume_at(self, task: Task, delay_s: float) -> None:
        turn = task.turn

        def resume() -> None:
            if task.turn != turn:
                return
            frozen_s = task.process.thaws_s - self.now_s
            if frozen_s > 0 and task.process.alive:
                self.at(frozen_s, resume)
            else:
                self._switch(task)

        self.at(delay_s, resume)

    def _switch(self, task: Task) -> None:
        task.turn += 1
        task.ready = None
        if not task.greenlet.dead:
            self.current = task
            if task.process.alive:
                task.greenlet.switch()
            elif task.greenlet:  # it has begun
                task.greenlet.throw(Killed)
            self.current = None
            if task.greenlet.dead:
                self.wake(task.process)
