"""Evaluations of the chain at its tail, and of other modules' early heads."""

from __future__ import annotations

import logging

from torch import Tensor

from dni_runtime.core.evaluation import Evaluation
from dni_runtime.core.step import ModuleStep
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.selection import Selection

log = logging.getLogger(__name__)


class Evaluations:
    """Adds up evaluations, also across restarts, and reports them.

    Args:
        step: The module.
        metrics: Where results go.
        ledger: Keeps the sums of an unfinished evaluation.
        cut: Where the module starts.
    """

    def __init__(self, step: ModuleStep, metrics: MetricsWriter, ledger: Ledger, cut: int) -> None:
        self._step = step
        self._metrics = metrics
        self._ledger = ledger
        self._current: Evaluation | None = None
        if (sums := ledger.progress.counts.evaluation) is not None:
            self._current = Evaluation.of(step)
            self._current.go_on_from(sums)
        spec = step.spec
        self._selection: Selection | None = None
        if spec.tail is not None and spec.tail.selection is not None:
            self._selection = Selection(metrics.run, spec.tail.selection, spec.module, cut)

    def add(self, h_BH: Tensor, y_BY: Tensor) -> None:
        """Count a batch, if the module makes predictions.

        Args:
            h_BH: The module's activation in eval mode.
            y_BY: The labels.
        """
        p_BP = self._step.predict(h_BH)
        if p_BP is None:
            return
        if self._current is None:
            self._current = Evaluation.of(self._step)
        self._current.add(p_BP, y_BY)
        self._ledger.keep_evaluation(self._current.to_dict())

    def checkpoint(self, cut: int) -> None:
        """Note that a checkpoint is written: the next evaluation is of its weights."""
        if self._selection is not None:
            self._selection.checkpoint(cut)

    def end(self, epoch: int, *, test: bool) -> bool:
        """Report the completed evaluation, if the module has one.

        Returns:
            Whether training should end, because the best evaluation is too old.
        """
        if self._current is None:
            return False
        result, samples = self._current.result(), self._current.samples
        self._current = None
        self._ledger.keep_evaluation(None)
        self._metrics.evaluated(result, samples, test=test)
        log.info(
            "epoch %d%s%s: %s",
            epoch,
            ", test set" if test else "",
            ", early head" if self._step.spec.tail is None else "",
            ", ".join(f"{k} {v:.4f}" for k, v in result.items()),
        )
        return self._selection is not None and not test and self._selection.evaluated(result, epoch)
