"""Loss and metrics over evaluation samples, at the tail or at an early head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from dni_runtime.core.forward import Inputs
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.metrics import (
    METRICS,
    OF_LOSS,
    TorchMetric,
    cross_entropy_of,
    mean_of,
)
from dni_runtime.core.step import ModuleStep
from dni_runtime.spec import Choice, WorkerSpec

_NATS = "cross-entropy"
"""Name of the mean that ``OF_LOSS`` are computed from, if the loss is another."""


class EvaluationSums:
    """Sums of a loss and metrics over one evaluation, on the predictions' device.

    Means are over valid labels, as the loss of one large batch would be: batches weigh by their
    labels, not by their samples. Of several losses each counts its own.
    """

    def __init__(
        self,
        loss: ChainLoss,
        metrics: Sequence[Choice],
        device: torch.device | str = "cpu",
    ) -> None:
        self.samples = 0
        self._loss = loss
        self._names = [metric.name for metric in metrics]
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._others = {
            metric.name: TorchMetric(metric, loss, device)
            for metric in metrics
            if metric.name not in METRICS
        }

    @classmethod
    def of(cls, step: ModuleStep) -> Self:
        """Make an evaluation of the chain at its tail, else of the module's early head."""
        if step.spec.tail is not None:
            return cls(step.loss, step.spec.tail.metrics, step.device)
        metrics = (Choice(name="accuracy"),) if step.classifies else ()
        return cls(step.loss, metrics, step.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the sums so far, as JSON; waits for the device."""
        sums = {name: [float(value) for value in pair] for name, pair in self._sums.items()}
        others = {name: metric.to_dict() for name, metric in self._others.items()}
        return {"samples": self.samples, "sums": sums, "others": others}

    def merge(self, document: dict[str, Any]) -> None:
        """Add sums that :meth:`to_dict` returned, of other batches."""
        self.samples += document["samples"]
        for name, (total, count) in document["sums"].items():
            self._add(name, _double(total), _double(count))
        for name, state in document["others"].items():
            self._others[name].merge(state)

    @torch.no_grad()
    def add(self, p_BP: Tensor, y_BY: Tensor) -> None:
        """Count one batch of predictions; only torchmetrics waits for the device."""
        for number, (mean, count) in enumerate(self._loss.means(p_BP, y_BY)):
            self._add(f"loss.{number}" if number else "loss", mean.double() * count.double(), count)
        for name in self._names:
            if name in self._others:
                self._others[name].add(p_BP, y_BY)
            elif name not in OF_LOSS:
                self._add(name, *mean_of(name, self._loss, p_BP, y_BY))
        if not self._loss.is_plain and not OF_LOSS.keys().isdisjoint(self._names):
            self._add(_NATS, *cross_entropy_of(self._loss, p_BP, y_BY))
        self.samples += len(p_BP)

    def result(self) -> dict[str, float]:
        """Return the loss and the metrics; NaN if no label was valid."""
        if not self.samples:
            return {}
        nats = "loss" if self._loss.is_plain else _NATS
        losses = [name for name in self._sums if name.partition(".")[0] == "loss"]
        # As in training, a loss without a valid label adds nothing to the others.
        counted = [name for name in losses if len(losses) == 1 or self._sums[name][1]]
        results = {"loss": sum(map(self._mean, counted)) if counted else math.nan}
        for name in self._names:
            if name in self._others:
                results[name] = self._others[name].result()
            else:
                results[name] = (
                    OF_LOSS[name](self._mean(nats)) if name in OF_LOSS else self._mean(name)
                )
        return results

    def _add(self, name: str, total: Tensor, count: Tensor) -> None:
        total, count = total.double(), count.double()
        if name in self._sums:
            before, counted = self._sums[name]
            total, count = before.to(total.device) + total, counted.to(count.device) + count
        self._sums[name] = total, count

    def _mean(self, name: str) -> float:
        total, count = self._sums[name]
        return float(total / count)


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def evaluate(
    predict: Callable[[Inputs], Tensor],
    batches: Iterable[tuple[Inputs, Tensor]],  # samples and labels
    worker: WorkerSpec,  # the tail
) -> dict[str, float]:
    """Return loss and metrics of a whole network in eval mode; see :class:`EvaluationSums`."""
    assert worker.tail is not None
    loss = ChainLoss(worker.loss, worker.prediction, worker.label)
    evaluation = EvaluationSums(loss, worker.tail.metrics)
    with torch.no_grad():
        for x, y_BY in batches:
            evaluation.add(predict(x), y_BY)
    return evaluation.result()
