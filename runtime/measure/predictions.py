"""A network's outputs on a data set, and what they are worth if it has labels.

Shape suffixes: N samples or labels in a row, C classes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.forward import Inputs, as_inputs
from dni_runtime.core.losses import ChainLoss, build_loss
from dni_runtime.core.metrics import check_metrics
from dni_runtime.data.splits import sample_of
from dni_runtime.errors import DataError, UsageError
from dni_runtime.files import write_atomic
from dni_runtime.network.source import first_line, write_tensor
from dni_runtime.spec import Choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""One or several, as in ``chain.yaml``: ``["accuracy", {"F1Score": {"task": "binary"}}]``."""


@dataclass(frozen=True)
class Predictions:
    """A network's outputs, sample by sample in the data's order.

    Attributes:
        outputs: One row for each sample. Where batches have a length of their own, what is shorter
            than the longest one ends with NaN.
        labels: Likewise; None if the data have none. Classes end with the label that the loss
            ignores, -100 if it says none.
        loss: The network's loss; None if it is not known.
        numbers: Which samples of the data the rows are of, from 0; None: all, in their order.
        metrics: Those that :meth:`evaluate` returns by default.
    """

    outputs: Tensor
    labels: Tensor | None
    loss: Choice | None
    metrics: tuple[Choice, ...] = ()
    numbers: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        network: Callable[[Inputs], Tensor],
        batches: Iterable[tuple[Inputs, Tensor]],  # samples and labels
        numbers_N: Tensor,  # of the samples in the data, in the order of the batches
        loss: Choice | None,
        metrics: tuple[Choice, ...] = (),
    ) -> Self:
        """Predict batch by batch; ``data.streams`` reads in another order."""
        pairs = [(_outputs(network, x), y) for x, y in batches]
        if not pairs:
            raise DataError("the data have no evaluation samples")
        order_N = numbers_N.argsort()
        outputs, labels = (_joined(some, loss)[order_N] for some in zip(*pairs, strict=True))
        numbers_N, all_N = numbers_N[order_N], torch.arange(len(numbers_N))
        numbers = None if torch.equal(numbers_N, all_N) else numbers_N
        return cls(outputs, labels if labels.numel() else None, loss, metrics, numbers)

    def evaluate(self, metrics: Metrics | None = None) -> dict[str, float]:
        """Loss and metrics.

        Args:
            metrics: Instead of the chain's, as in ``chain.yaml``.

        Raises:
            UsageError: The data have no labels.
            SpecError: There is no such metric, or it does not fit.
        """
        loss, labels = self._compared()
        loss.check_labels(labels, "label ", self.numbers)
        chosen = self.metrics if metrics is None else parse_metrics(metrics)
        check_metrics(chosen, loss, sample_of(self.outputs), sample_of(labels))
        evaluation = EvaluationSums(loss, chosen)
        evaluation.add(self.outputs, labels)
        return evaluation.result()

    def confusion(self) -> Tensor:
        """How often each class was taken for each: ``[C, C]``, a row for each label.

        Raises:
            UsageError: The data have no labels, or these are not classes.
        """
        loss, labels = self._compared()
        if loss.class_axis is None:
            raise UsageError("a confusion matrix needs labels that are classes")
        loss.check_labels(labels, "label ", self.numbers)
        p_NC, y_N = loss.rows(self.outputs, labels)
        valid_N, classes = loss.valid(y_N), p_NC.shape[1]
        pairs_N = y_N * classes + p_NC.argmax(1)
        if valid_N is not None:
            pairs_N = pairs_N[valid_N]
        return torch.bincount(pairs_N, minlength=classes**2).view(classes, classes)

    @property
    def classes(self) -> int | None:
        """Number of classes; None if there are no labels, or none are classes."""
        known = self.labels is not None and self.loss is not None
        return self._compared()[0].scores if known else None

    def plot(self) -> Figure:
        """The confusion matrix as a figure of matplotlib.

        Raises:
            UnavailableError: matplotlib is not installed.
        """
        from dni_runtime.measure.curves import draw_matrix

        return draw_matrix(self.confusion().tolist())

    def save(self, file: Path | str) -> None:
        """Write ``outputs`` and, if there are any, ``labels`` to a NumPy ``.npz`` file.

        If they are of some samples only, ``numbers`` says which.
        """
        outputs = self.outputs
        if outputs.dtype == torch.bfloat16:  # NumPy lacks it
            outputs = outputs.float()
        arrays: dict[str, Any] = {"outputs": outputs.numpy()}
        if self.labels is not None:
            arrays["labels"] = self.labels.numpy()
        if self.numbers is not None:
            arrays["numbers"] = self.numbers.numpy()
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_atomic(Path(file), content.getvalue(), mode=0o644)

    def _compared(self) -> tuple[ChainLoss, Tensor]:
        """Return the loss, and the labels."""
        if self.labels is None:
            raise UsageError("the data have no labels to compare with")
        if self.loss is None:
            raise UsageError(
                "the losses of several outputs are not known", hint="predict by the run"
            )
        return ChainLoss(self.loss, sample_of(self.outputs), sample_of(self.labels)), self.labels


def _joined(batches: Sequence[Tensor], loss: Choice | None) -> Tensor:
    """Join batches; shorter ones are filled up, so that their metrics stay the same."""
    sizes = [max(some) for some in zip(*(batch.shape[1:] for batch in batches), strict=True)]
    if all(list(batch.shape[1:]) == sizes for batch in batches):
        return torch.cat(list(batches))
    fill = math.nan
    if not batches[0].is_floating_point():
        fill = getattr(None if loss is None else build_loss(loss), "ignore_index", -100)
    whole = batches[0].new_full((sum(map(len, batches)), *sizes), fill)
    parts = torch.split(whole, [*map(len, batches)])
    for part, batch in zip(parts, batches, strict=True):
        part[(slice(None), *map(slice, batch.shape[1:]))] = batch
    return whole


def parse_metrics(metrics: Metrics) -> tuple[Choice, ...]:
    """Return the choices that metrics, as in ``chain.yaml``, are."""
    several = (metrics,) if isinstance(metrics, str | Mapping) else tuple(metrics)
    try:
        return TypeAdapter(tuple[Choice, ...]).validate_python(several)
    except ValidationError as error:
        raise UsageError(f"metrics: {error.errors()[0]['msg']}") from None


def _outputs(network: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
    try:
        return network(x)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        samples = " and ".join(write_tensor(sample_of(one)) for one in as_inputs(x))
        raise DataError(
            f"the network does not take these samples, {samples}: {first_line(error)}",
            hint="give it data as those of its training, such as --data "
            "'{dataset: …, flatten: true}'",
        ) from error
