"""Shared parts of synthesizers: the label's part, lessons, zeros as initial weights."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.labels import labels_each_token
from dni_runtime.core.losses import ChainLoss, cross_entropy
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.named import Frozen

Zeroable = TypeVar("Zeroable", nn.Linear, nn.Conv2d)


class LabelTerm(nn.Module):
    """What the label adds to a layer of a synthesizer: a vector per class, or a linear map.

    A one-hot label through a linear map is a row of its matrix, so class labels are looked up.
    Several labels add the mean of their vectors, unless each token has its own.

    Args:
        features: Length of the vectors.
        label: One sample's label.
        classes: Number of classes, when labels are class indices.
        per_token: Whether each token has a label.
    """

    def __init__(
        self, features: int, label: TensorSpec, classes: int | None, *, per_token: bool = False
    ) -> None:
        super().__init__()
        self._averages = bool(label.shape) and not per_token
        self.table: nn.Embedding | None = None
        self.map: nn.Linear | None = None
        if classes is not None:
            self.table = nn.Embedding(classes, features)
            nn.init.zeros_(self.table.weight)
        else:
            self.map = nn.Linear(math.prod(label.shape), features, bias=False)
            nn.init.zeros_(self.map.weight)

    def forward(self, y_BY: Tensor, valid_BY: Tensor | None = None) -> Tensor:
        """Return the label's part: (B, features), or (B, T, features) for a label per token.

        Args:
            y_BY: The labels.
            valid_BY: Which of them count; the others have no part. None: all do.
        """
        if self.table is not None:
            known_BY = y_BY if valid_BY is None else y_BY.masked_fill(~valid_BY, 0)
            if self._averages:
                return self._mean(known_BY.flatten(1), valid_BY)
            term: Tensor = self.table(known_BY)
            return term if valid_BY is None else term * valid_BY.unsqueeze(-1)
        assert self.map is not None
        return cast("Tensor", self.map(y_BY.reshape(len(y_BY), -1).to(self.map.weight.dtype)))

    def _mean(self, y_BN: Tensor, valid_BY: Tensor | None) -> Tensor:
        assert self.table is not None
        weights = self.table.weight
        if valid_BY is None:
            return F.embedding_bag(y_BN, weights, mode="mean")
        valid_BN = valid_BY.flatten(1)
        share_BN = valid_BN / valid_BN.sum(1, keepdim=True).clamp_min(1)
        return F.embedding_bag(
            y_BN, weights, mode="sum", per_sample_weights=share_BN.to(weights.dtype)
        )


class Lesson(NamedTuple):
    """What a synthesizer learns from a true gradient.

    Attributes:
        g_BH: The prediction; None if the loss does not need it.
        loss: The loss to minimise.
    """

    g_BH: Tensor | None
    loss: Tensor


class Synthesizer(nn.Module):
    """Base: predicts per-sample gradients in the shape of the activation.

    Args:
        activation: One sample of the activation.
        label: One sample's label, or None when not conditioned.
        classes: Number of classes, when labels are class indices.
        options: The synthesizer's own options.

    Attributes:
        per_token: Whether each token has a label.
        loss: The chain's loss, with the ignored labels; before :meth:`set_loss`, a plain
            cross-entropy if there are classes.
    """

    Options: ClassVar[type[Frozen]] = Frozen

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: Any,
    ) -> None:
        super().__init__()
        self.activation = activation
        # Tokens (T x C) share one map over channels; everything else is one vector.
        self.tokens = len(activation.shape) == 2
        self.features = activation.shape[-1] if self.tokens else math.prod(activation.shape)
        self.per_token = label is not None and labels_each_token(activation, label)
        self.label: LabelTerm | None = None
        self.loss: ChainLoss | None = None if classes is None else cross_entropy(classes)
        self._label = label
        self._classes = classes
        self.build(options)

    def build(self, options: Any) -> None:
        """Make the layers; the shapes are known.

        Args:
            options: The synthesizer's own options.
        """

    def set_loss(self, loss: ChainLoss) -> None:
        """Set the chain's loss, before the synthesizer is used."""
        self.loss = loss

    def predict(self, h_BH: Tensor, y_BY: Tensor) -> Tensor:
        """Return the prediction: zero, like the true gradient, if all labels are ignored.

        Args:
            h_BH: The activation, detached.
            y_BY: The labels.
        """
        g_BH: Tensor = self(h_BH, y_BY)
        valid_BY = self._valid(y_BY)
        if valid_BY is None:
            return g_BH
        taught_B = valid_BY.flatten(1).any(1) if valid_BY.dim() > 1 else valid_BY
        return g_BH.masked_fill(~taught_B.view(-1, *[1] * (g_BH.dim() - 1)), 0.0)

    def lesson(self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor) -> Lesson:
        """The squared error of the prediction, summed over features and averaged over the batch.

        Args:
            h_BH: The activation, detached.
            y_BY: The labels.
            g_BH: The true per-sample gradient at h.
        """
        predicted_BH = self.predict(h_BH, y_BY)
        return Lesson(predicted_BH, F.mse_loss(predicted_BH, g_BH, reduction="sum") / len(g_BH))

    def _label_term(self, features: int) -> LabelTerm | None:
        if self._label is None:
            return None
        return LabelTerm(features, self._label, self._classes, per_token=self.per_token)

    def _one_class_each(self) -> int:
        """Return the number of classes, of which each sample or each token has one.

        Raises:
            ValueError: There are other labels.
        """
        if self._classes is None or self._label is None:
            raise ValueError("needs class labels and 'conditioned: true'")
        if self._label.shape and not self.per_token:
            raise ValueError(f"needs one label for each sample or each token, not {self._label}")
        return self._classes

    def _valid(self, y_BY: Tensor) -> Tensor | None:
        """Return which labels count; None if all do."""
        return None if self.loss is None else self.loss.valid(y_BY)

    def _vectors(self, h_BH: Tensor) -> Tensor:
        return h_BH if self.tokens else h_BH.flatten(1)

    def _add_label(self, out: Tensor, y_BY: Tensor | None) -> Tensor:
        if self.label is None or y_BY is None:
            return out
        term: Tensor = self.label(y_BY, self._valid(y_BY))
        while term.dim() < out.dim():  # one label for all tokens of a sample
            term = term.unsqueeze(1)
        return out + term


def zeroed(layer: Zeroable) -> Zeroable:
    """Return the layer, with zero weights and bias."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
