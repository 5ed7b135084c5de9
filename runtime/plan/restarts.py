"""Decides when a dead worker is restarted (pure, no processes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dni_runtime.errors import LASTING, UnansweredError, UnavailableError

Scope = Literal["module", "chain"]


@dataclass(frozen=True)
class RestartPlan:
    """A plan's rules for restarts (``restart`` in chain.yaml).

    The ``scope`` is the module that died, or the whole chain if a gradient interface waits for true
    gradients, which are lost with the module, or replicas form a process group, which does not
    survive the loss of a process.
    """

    policy: Literal["on-failure", "never"] = "never"
    limit: int = 10  # consecutive restarts of one module before the run fails
    backoff_s: float = 0.5  # before the first restart; doubled for each further one
    backoff_max_s: float = 30.0  # longest wait before a restart
    healthy_s: float = 60.0  # of uptime, which reset the count of restarts
    # whether stalled modules (``supervise/stall.py``) are restarted or only reported
    on_stall: Literal["warn", "restart"] = "warn"
    stall_s: float = 120.0  # without progress, after which a module may count as stalled
    scope: Scope = "module"


@dataclass
class Backoff:
    """Recent restarts of one module."""

    streak: int = 0  # consecutive restarts without ``healthy_s`` of uptime between
    attempt: int = 0  # the newest that has run; 0: none
    running_since_s: float | None = None  # None: its worker does not run
    # the error that ended it last, and its position in the stream then; None: a signal
    death: tuple[str, int] | None = None

    def repeats(self, error: str | None, id: int) -> bool:
        """Note what has ended a worker; return whether the same did at the same position before.

        What the same input does twice it will do a third time.
        """
        before, self.death = self.death, (error, id) if error else None
        return self.death is not None and self.death == before

    def runs(self, attempt: int, now_s: float) -> bool:
        """Note that the worker of an attempt runs; return whether that is news."""
        if attempt == self.attempt:
            return False
        self.attempt, self.running_since_s = attempt, now_s
        return True

    def stood_still(self, seconds: float) -> None:
        """Do not count the seconds in which a worker had stalled as uptime."""
        if self.running_since_s is not None:
            self.running_since_s += seconds

    def allows(self, plan: RestartPlan, exit_code: int, now_s: float) -> bool:
        """Whether the rules allow another restart; see :meth:`delay_s`."""
        since_s = self.running_since_s
        # what was available once (an address, a driver, a neighbour) may be so again
        passing = (UnavailableError.exit_code, UnansweredError.exit_code)
        passes = self.attempt > 0 and exit_code in passing
        if plan.policy == "never" or (exit_code in LASTING and not passes):
            return False
        healthy = since_s is not None and now_s - since_s >= plan.healthy_s
        return (0 if healthy else self.streak) < plan.limit

    def delay_s(self, plan: RestartPlan, exit_code: int, now_s: float) -> float | None:
        """Return the seconds until the restart; None if there is none.

        ``exit_code`` is as a shell reports it, ``now_s`` by the clock of ``running_since_s``.
        """
        allowed = self.allows(plan, exit_code, now_s)
        since_s, self.running_since_s = self.running_since_s, None
        if since_s is not None and now_s - since_s >= plan.healthy_s:
            self.streak = 0
        if not allowed:
            return None
        self.streak += 1
        # the exponent is limited: 2 to the power of a large limit overflows a float
        doublings = min(self.streak - 1, 60)
        return float(min(plan.backoff_s * 2**doublings, plan.backoff_max_s))
