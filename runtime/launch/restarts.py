"""When a worker that has died is restarted: pure decisions, no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dni_runtime.errors import LASTING, UnavailableError

Scope = Literal["module", "chain"]


@dataclass(frozen=True)
class RestartPlan:
    """What a plan says of restarts (``restart`` in chain.yaml).

    Attributes:
        policy: Whether there are any.
        limit: Consecutive restarts of one module before the run fails.
        backoff_s: Seconds before the first one; each further one waits twice as long.
        backoff_max_s: The longest wait.
        healthy_s: A worker that has run this long starts the count anew.
        on_stall: Whether what has stalled (``launch/stall.py``) is restarted, or only told.
        stall_s: Seconds without progress after which that is so.
        scope: What is restarted: the module that died, or the whole chain where a gradient
            interface waits for true gradients, which would be lost with the module.
    """

    policy: Literal["on-failure", "never"] = "never"
    limit: int = 10
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    healthy_s: float = 60.0
    on_stall: Literal["warn", "restart"] = "warn"
    stall_s: float = 120.0
    scope: Scope = "module"


@dataclass
class Backoff:
    """How often one module has been restarted lately.

    Attributes:
        streak: Starts again without a healthy stretch between.
        running_since_s: When the present worker began to run, or None.
        ran: Whether an earlier one has.
    """

    streak: int = 0
    running_since_s: float | None = None
    ran: bool = False

    def stood_still(self, seconds: float) -> None:
        """Do not count a worker's last seconds, in which it had stalled, as healthy ones."""
        if self.running_since_s is not None:
            self.running_since_s += seconds

    def delay_s(self, plan: RestartPlan, exit_code: int, now_s: float) -> float | None:
        """Seconds until the next start; None where there is none.

        Args:
            plan: The rules.
            exit_code: How the worker ended, as a shell reports it.
            now_s: The time, by the clock of ``running_since_s``.
        """
        since_s, self.running_since_s = self.running_since_s, None
        self.ran |= since_s is not None
        # what a module once had (an address, a driver, a neighbour) may come back
        passes = self.ran and exit_code == UnavailableError.exit_code
        if plan.policy == "never" or (exit_code in LASTING and not passes):
            return None
        if since_s is not None and now_s - since_s >= plan.healthy_s:
            self.streak = 0
        if self.streak >= plan.limit:
            return None
        self.streak += 1
        # limited before it is raised: 2 to the power of a large limit is no float
        doublings = min(self.streak - 1, 60)
        return float(min(plan.backoff_s * 2**doublings, plan.backoff_max_s))
