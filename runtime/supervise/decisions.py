"""What the exit of a worker means for its run: a pure table (docs/operations.md)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dni_runtime.errors import (
    CheckpointError,
    DamagedError,
    DataError,
    DivergedError,
    DniError,
    StoppedError,
)

Ending = Literal["finished", "stopped", "failed"]


class Action(Enum):
    """What the supervisor does when a worker has exited."""

    NOTHING = "wait for the others"
    MOVE = "start it on another node, at once"
    RESTART_ALL = "restart all modules, at once"
    RESTART_NOW = "restart it, at once"
    FALL_BACK = "restart all modules from an older checkpoint"
    RESTART = "restart it, or all modules with it, after a pause"
    FAIL = "stop all workers: the run fails"
    STOP = "stop all workers"


@dataclass(frozen=True)
class Exit:
    """What is known of a worker that has exited."""

    exit_code: int  # as a shell reports it
    finished: bool = False  # its last report says so
    reported: bool = True  # at all; also if a signal or exit code 0 ended it
    lost: bool = False  # with its node
    killed: bool = False  # by the supervisor
    asked: bool = False  # it left because a restart was requested
    torn: bool = False  # the others cannot go on with what it has saved
    due: bool = False  # a restart of all modules is scheduled
    older_cut: bool = False  # there may be an older checkpoint to start from
    may_restart: bool = False  # the rules allow it (``plan/plan.py``)
    repeated: bool = False  # the same error has ended it at the same position before

    def ending(self, *, stopping: bool) -> Ending:
        # SIGTERM kills a worker that is still importing torch and has no handler yet.
        obeyed = self.killed or self.exit_code in (0, 128 + signal.SIGTERM)
        if self.lost:  # however its process ended
            return "stopped" if stopping else "failed"
        if self.finished:
            return "finished"
        stopped = self.exit_code == StoppedError.exit_code or (stopping and obeyed)
        return "stopped" if stopped else "failed"


def decide(worker: Exit, *, stopping: bool) -> Action:
    """Return what to do when a worker has exited; the first rule that applies decides."""
    ending = worker.ending(stopping=stopping)
    damaged = worker.exit_code == DamagedError.exit_code
    may_restart = worker.reported and worker.may_restart and not worker.repeated
    goes_on = not stopping
    rules = (
        (worker.due, Action.NOTHING),
        (goes_on and worker.lost, Action.MOVE),
        (goes_on and worker.asked and ending != "finished" and worker.torn, Action.RESTART_ALL),
        (goes_on and worker.asked and ending != "finished", Action.RESTART_NOW),
        (goes_on and damaged and worker.older_cut, Action.FALL_BACK),
        (goes_on and ending == "failed" and may_restart, Action.RESTART),
        (ending == "failed", Action.FAIL),
        (ending == "stopped", Action.STOP),
    )
    return next((action for applies, action in rules if applies), Action.NOTHING)


def conclusion(
    failed: int | None, workers: Iterable[str], killed_by: int | None, *, whole: Callable[[], bool]
) -> tuple[Literal["finished", "stopped", "failed"], int]:
    """Return a run's last phase and exit code.

    ``failed`` is the exit code of the module that failed first, ``workers`` the states of those
    that take part in this start, ``killed_by`` the second signal, which killed all workers.
    ``whole`` is called if all have finished: it returns whether their last checkpoint is there.
    """
    if failed is not None:
        told = (DivergedError.exit_code, DataError.exit_code, CheckpointError.exit_code)
        return "failed", failed if failed in told else DniError.exit_code
    if all(state == "finished" for state in workers) and whole():
        return "finished", 0
    return "stopped", StoppedError.exit_code if killed_by is None else 128 + killed_by
