"""Evaluations of the chain at its tail, and of other modules' early heads."""

from __future__ import annotations

import logging

from torch import Tensor

from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.step import ModuleStep
from dni_runtime.link import Marker
from dni_runtime.run.documents.shares import Share
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.selection import Selection
from dni_runtime.worker.shares import Shares

log = logging.getLogger(__name__)


class Evaluations:
    """Adds up evaluations, also across restarts, and reports them.

    Of the tail's replicas the first one reports, with what the others have counted.
    """

    def __init__(
        self, step: ModuleStep, metrics: MetricsWriter, ledger: Ledger, start: Start
    ) -> None:
        self._step = step
        self._metrics = metrics
        self._ledger = ledger
        self._current: EvaluationSums | None = None
        if (sums := ledger.progress.counts.evaluation) is not None:
            self._current = EvaluationSums.of(step)
            self._current.merge(sums)
        spec = step.spec
        self._shares: Shares | None = None
        self._steps = 0
        if spec.tail is not None and spec.replicas > 1:
            self._shares = Shares(metrics.run, spec, start.begun)
        self._selection: Selection | None = None
        if spec.tail is not None and spec.tail.selection is not None and spec.replica == 1:
            self._selection = Selection(metrics.run, spec.tail.selection, spec.module, start.cut)

    def add(self, h_BH: Tensor, y_BY: Tensor) -> None:
        """Count a batch, if the module makes predictions; its activation is of eval mode."""
        p_BP = self._step.predict(h_BH)
        if p_BP is None:
            return
        if self._current is None:
            self._current = EvaluationSums.of(self._step)
        self._current.add(p_BP, y_BY)
        self._ledger.keep_evaluation(self._current.to_dict())

    def checkpoint(self, cut: int) -> None:
        """Note that a checkpoint is written: the next evaluation is of its weights."""
        if self._selection is not None:
            self._selection.checkpoint(cut)

    def complete(self, marker: Marker) -> bool:
        """Whether all parts of the evaluation before a marker are there; if not, call it again."""
        shares = self._shares
        if shares is None:
            return True
        if not shares.reports:
            sums = None if self._current is None else self._current.to_dict()
            step = self._ledger.progress.step
            return shares.give(Share(id=marker.id, step=step, sums=sums))
        others = shares.others(marker.id)
        if others is None:
            return False
        for sums in [share.sums for share in others if share.sums is not None]:
            self._current = self._current or EvaluationSums.of(self._step)
            self._current.merge(sums)
            self._ledger.keep_evaluation(self._current.to_dict())
        self._steps = sum(share.step for share in others)
        return True

    def end(self, epoch: int, *, test: bool) -> bool:
        """Report the completed evaluation, if the module has one, or a part of one.

        Returns whether training should end, because the best evaluation is too old.
        """
        current, self._current = self._current, None
        self._ledger.keep_evaluation(None)
        if current is None or (self._shares is not None and not self._shares.reports):
            return False
        result, step = current.result(), self._ledger.progress.step + self._steps
        self._metrics.evaluated(result, current.samples, step=step, test=test)
        log.info(
            "epoch %d%s%s: %s",
            epoch,
            ", test set" if test else "",
            ", early head" if self._step.spec.tail is None else "",
            ", ".join(f"{k} {v:.4f}" for k, v in result.items()),
        )
        return self._selection is not None and not test and self._selection.evaluated(result, epoch)
