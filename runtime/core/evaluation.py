"""Loss and metrics over evaluation samples, at the tail or at an early head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.training import METRICS
from dni_runtime.spec import WorkerSpec


class Evaluation:
    """Sums of a loss and metrics over one evaluation, on the predictions' device.

    Args:
        loss: The chain's loss.
        metrics: Names of the metrics.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], metrics: tuple[str, ...]) -> None:
        self._functions = {"loss": loss, **{name: METRICS[name] for name in metrics}}
        self.samples = 0
        self._sums: dict[str, Tensor] = {}

    @classmethod
    def of(cls, step: ModuleStep) -> Self:
        """Of the chain at its tail, else of the module's early head."""
        if step.spec.tail is not None:
            return cls(step.loss, step.spec.tail.metrics)
        return cls(step.loss, ("accuracy",) if step.classifies else ())

    def to_dict(self) -> dict[str, Any]:
        """The sums so far; waits for the device."""
        sums = {name: float(total) for name, total in self._sums.items()}
        return {"samples": self.samples, "sums": sums}

    def go_on_from(self, document: dict[str, Any]) -> None:
        """Begin with the sums that :meth:`to_dict` gave."""
        self.samples = document["samples"]
        self._sums = {
            name: torch.tensor(total, dtype=torch.float64)
            for name, total in document["sums"].items()
        }

    def add(self, p_BP: Tensor, y_BY: Tensor) -> None:
        """Count one batch of predictions, without waiting for a device."""
        with torch.no_grad():
            for name, function in self._functions.items():
                total = function(p_BP, y_BY).double() * len(p_BP)
                before = self._sums.get(name)
                self._sums[name] = total if before is None else before.to(total.device) + total
        self.samples += len(p_BP)

    def result(self) -> dict[str, float]:
        """Means over all samples."""
        return {name: float(total) / max(self.samples, 1) for name, total in self._sums.items()}


def evaluate(
    predict: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    worker: WorkerSpec,
) -> dict[str, float]:
    """Loss and metrics of a whole network, weighted by batch size.

    Args:
        predict: The network in eval mode, from samples to predictions.
        batches: Pairs of samples and labels.
        worker: The tail's spec, for loss and metrics.
    """
    assert worker.tail is not None
    evaluation = Evaluation(
        ChainLoss(worker.loss, worker.prediction, worker.label), worker.tail.metrics
    )
    with torch.no_grad():
        for x_BX, y_BY in batches:
            evaluation.add(predict(x_BX), y_BY)
    return evaluation.result()
