"""What the exit of a worker means for its run: a pure table (docs/operations.md)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dni_runtime.errors import DamagedError, DataError, DivergedError, DniError, StoppedError

Ending = Literal["finished", "stopped", "failed"]


class Action(Enum):
    """What the supervisor does when a worker has exited."""

    NOTHING = "wait for the others"
    MOVE = "start it on another node, at once"
    RESTART_NOW = "restart it, at once"
    FALL_BACK = "restart all modules from an older checkpoint"
    RESTART = "restart it, or all modules with it, after a pause"
    FAIL = "stop all workers: the run fails"
    STOP = "stop all workers"


@dataclass(frozen=True)
class Exit:
    """What is known of a worker that has exited.

    Attributes:
        exit_code: Its exit code, as a shell reports it.
        finished: Whether its last report says that it has finished.
        reported: Whether it has reported at all, or was ended by a signal.
        lost: Whether its node is lost.
        killed: Whether the supervisor has killed it.
        asked: Whether it left because a restart was requested.
        due: Whether a restart of all modules is due.
        older_cut: Whether there may be an older checkpoint to start from.
        may_restart: Whether the rules allow another restart (``launch/restarts.py``).
        again: Whether the same error has ended it at the same position before.
    """

    exit_code: int
    finished: bool = False
    reported: bool = True
    lost: bool = False
    killed: bool = False
    asked: bool = False
    due: bool = False
    older_cut: bool = False
    may_restart: bool = False
    again: bool = False

    def ending(self, *, stopping: bool) -> Ending:
        """Return how the worker has ended.

        Args:
            stopping: Whether the run is being stopped.
        """
        # SIGTERM kills a worker that is still importing torch and has no handler yet.
        obeyed = self.killed or self.exit_code in (0, 128 + signal.SIGTERM)
        if self.lost:  # however its process ended
            return "stopped" if stopping else "failed"
        if self.finished:
            return "finished"
        stopped = self.exit_code == StoppedError.exit_code or (stopping and obeyed)
        return "stopped" if stopped else "failed"


def decide(worker: Exit, *, stopping: bool) -> Action:
    """Return what to do when a worker has exited; the first rule that applies decides.

    Args:
        worker: What is known of it.
        stopping: Whether the run is being stopped.
    """
    ending = worker.ending(stopping=stopping)
    damaged = worker.exit_code == DamagedError.exit_code
    may_restart = worker.reported and worker.may_restart and not worker.again
    goes_on = not stopping
    rules = (
        (worker.due, Action.NOTHING),
        (goes_on and worker.lost, Action.MOVE),
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

    Args:
        failed: Exit code of the module that failed first; None: no module failed.
        workers: States of the workers that take batches.
        killed_by: The second signal, which killed all workers; None: there was none.
        whole: Asked if all have finished: whether their last checkpoint is there.
    """
    if failed is not None:
        told = (DivergedError.exit_code, DataError.exit_code)
        return "failed", failed if failed in told else DniError.exit_code
    if all(state == "finished" for state in workers) and whole():
        return "finished", 0
    return "stopped", StoppedError.exit_code if killed_by is None else 128 + killed_by
