"""The best checkpoint so far, by a metric of the evaluations, and early stopping."""

from __future__ import annotations

import logging
import math

from dni_runtime.run.cuts import written_cuts
from dni_runtime.run.documents.best import Best
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.worker import SelectionRole

log = logging.getLogger(__name__)


class Selection:
    """The tail's record of evaluations, kept in ``checkpoints/best.json``.

    An evaluation is identified by the checkpoint before it: a repeated one is not counted again.
    Findings after ``cut``, where the tail starts, do not count.
    """

    def __init__(self, run: RunDir, role: SelectionRole, module: str, cut: int) -> None:
        self._run = run
        self._role = role
        # A module that is restarted alone may start at a snapshot, which is not a checkpoint.
        self._cut = max(
            (position for position in written_cuts(run, [module]) if position <= cut), default=cut
        )
        self._best = Best(metric=role.metric)
        stored = Best.load(run.best)
        if stored is not None and stored.metric == role.metric:
            best = self._best if stored.cut is None or stored.cut > cut else stored
            worse = tuple(position for position in stored.worse if position <= cut)
            self._best = best.model_copy(update={"worse": worse})

    def checkpoint(self, cut: int) -> None:
        """Note that a checkpoint is written: the next evaluation is of its weights."""
        self._cut = cut

    def evaluated(self, result: dict[str, float], epoch: int) -> bool:
        """Compare an evaluation with the best one.

        Returns whether training should end, because the best evaluation is too old.
        """
        metric, best = self._role.metric, self._best
        if self._better(result[metric]):
            self._best = Best(metric=metric, cut=self._cut, epoch=epoch, value=result[metric])
        elif self._cut not in (best.cut, *best.worse):
            self._best = best.model_copy(update={"worse": (*best.worse, self._cut)})
        try:
            self._best.write(self._run.best)
        except OSError as error:  # a full disk: no reason to stop training
            log.warning("the best checkpoint cannot be recorded: %s", error)
        patience = self._role.patience
        return patience is not None and len(self._best.worse) >= patience

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best.cut is None:
            return True
        gain = value - self._best.value
        return (gain if self._role.rises else -gain) > self._role.min_delta
