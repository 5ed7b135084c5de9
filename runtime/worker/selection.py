"""The best checkpoint so far, by a metric of the evaluations, and when there is no better one."""

from __future__ import annotations

import logging
import math

from dni_runtime.rundir import RunDir, read_json, write_json
from dni_runtime.spec.worker import SelectionRole

log = logging.getLogger(__name__)


class Selection:
    """What the tail knows of evaluations; written down in ``best.json``.

    Args:
        run: The run directory.
        role: The metric, and for how long it may stand still.
        cut: Where the run goes on: what was found behind it does not count.
    """

    def __init__(self, run: RunDir, role: SelectionRole, cut: int) -> None:
        self._run = run
        self._role = role
        self._cut = cut
        found = read_json(run.best) or {}
        known = found.get("metric") == role.metric and found.get("cut", math.inf) <= cut
        self._best = float(found["value"]) if known else None
        self._stands_still = int(found["evaluations_since"]) if known else 0

    def checkpoint(self, cut: int) -> None:
        """A checkpoint is written here; the next evaluation is of these weights."""
        self._cut = cut

    def evaluated(self, result: dict[str, float], epoch: int) -> bool:
        """Compare an evaluation with the best one.

        Returns:
            Whether there has been no better one for so long that training is to end.
        """
        role, value = self._role, result[self._role.metric]
        if self._better(value):
            self._best, self._stands_still = value, 0
            document = {"cut": self._cut, "epoch": epoch, "metric": role.metric, "value": value}
        else:
            self._stands_still += 1
            document = dict(read_json(self._run.best) or {})
        write_json(self._run.best, {**document, "evaluations_since": self._stands_still})
        return role.patience is not None and self._stands_still >= role.patience

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        gain = value - self._best if self._role.rises else self._best - value
        return gain > self._role.min_delta


def best_cut(run: RunDir) -> int | None:
    """The position of the best checkpoint, where one is selected."""
    cut = (read_json(run.best) or {}).get("cut")
    return cut if isinstance(cut, int) else None
