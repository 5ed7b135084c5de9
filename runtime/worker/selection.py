"""The best checkpoint so far, by a metric of the evaluations, and early stopping."""

from __future__ import annotations

import logging
import math
from typing import Any

from dni_runtime.cuts import written_cuts
from dni_runtime.rundir import RunDir, read_json, write_json
from dni_runtime.spec.worker import SelectionRole

log = logging.getLogger(__name__)


class Selection:
    """The tail's record of evaluations, kept in ``checkpoints/best.json``.

    An evaluation is identified by the checkpoint before it: a repeated one is not counted again.

    Args:
        run: The run directory.
        role: The metric, and the patience.
        module: The tail's name.
        cut: Where the tail starts: later findings do not count.
    """

    def __init__(self, run: RunDir, role: SelectionRole, module: str, cut: int) -> None:
        self._run = run
        self._role = role
        # A module that is restarted alone may start at a snapshot, which is not a checkpoint.
        self._cut = max((one for one in written_cuts(run, [module]) if one <= cut), default=cut)
        self._best: dict[str, Any] = {}
        self._worse: list[int] = []  # evaluations since the best one, by their checkpoints
        found = read_json(run.best) or {}
        if found.get("metric") == role.metric:
            self._worse = [one for one in found.get("worse", []) if one <= cut]
            if found.get("cut", math.inf) <= cut:
                self._best = {key: found[key] for key in ("cut", "epoch", "value")}

    def checkpoint(self, cut: int) -> None:
        """Note that a checkpoint is written: the next evaluation is of its weights."""
        self._cut = cut

    def evaluated(self, result: dict[str, float], epoch: int) -> bool:
        """Compare an evaluation with the best one.

        Returns:
            Whether training should end, because the best evaluation is too old.
        """
        value = result[self._role.metric]
        if self._better(value):
            self._best, self._worse = {"cut": self._cut, "epoch": epoch, "value": value}, []
        elif self._cut not in (self._best.get("cut"), *self._worse):
            self._worse.append(self._cut)
        document = {"metric": self._role.metric, **self._best, "worse": self._worse}
        try:
            write_json(self._run.best, document)
        except OSError as error:  # a full disk: no reason to stop training
            log.warning("the best checkpoint cannot be recorded: %s", error)
        patience = self._role.patience
        return patience is not None and len(self._worse) >= patience

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if not self._best:
            return True
        gain = value - float(self._best["value"])
        return (gain if self._role.rises else -gain) > self._role.min_delta


def best_cut(run: RunDir) -> int | None:
    """Return the position of the best checkpoint, if one is selected."""
    cut = (read_json(run.best) or {}).get("cut")
    return cut if isinstance(cut, int) else None
