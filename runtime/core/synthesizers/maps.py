"""Synthesizers without hidden layers: linear, of low rank, shaped like a classifier."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.synthesizers.base import Synthesizer, zeroed
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.named import Frozen


class Linear(Synthesizer):
    """``g = W h + E[y] + b`` (the paper's "linear" model): exact for a linear tail with MSE."""

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: Frozen,
    ) -> None:
        super().__init__(activation, label, classes, options)
        self.out = zeroed(nn.Linear(self.features, self.features))
        self.label = self._label_term(self.features)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        out = self._add_label(self.out(self._vectors(h_BH)), y_BY)
        return out.view_as(h_BH)


class LowRankOptions(Frozen):
    """Options of the low-rank map."""

    rank: int = Field(default=64, ge=1, le=65536)  # size of the inner vector


class LowRank(Synthesizer):
    """``g = U (V h) + E[y] + b`` with rank R: 2 R / H of the full map's cost."""

    Options = LowRankOptions

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: LowRankOptions,
    ) -> None:
        super().__init__(activation, label, classes, options)
        self.inner = nn.Linear(self.features, min(options.rank, self.features), bias=False)
        self.out = zeroed(nn.Linear(self.inner.out_features, self.features))
        self.label = self._label_term(self.features)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        out = self._add_label(self.out(self.inner(self._vectors(h_BH))), y_BY)
        return out.view_as(h_BH)


class ClassifierOptions(Frozen):
    """Options of the classifier-shaped synthesizer."""

    heads: int = Field(default=1, ge=1, le=256)  # guesses, each with its own maps


class Classifier(Synthesizer):
    """``g = U (softmax(V h) - onehot(y)) + b``: the gradient of a classifier seen from below.

    The true gradient of a cross-entropy loss starts as softmax minus one-hot at the tail; V guesses
    what the tail will predict from h, U maps the difference back. Two maps to and from the classes
    cost far less than a full one, and follow the true gradient more closely (docs/chain.md).
    """

    Options = ClassifierOptions

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: ClassifierOptions,
    ) -> None:
        super().__init__(activation, label, classes, options)
        self._refuse_other_labels()
        assert classes is not None
        self.heads, self.classes = options.heads, classes
        self.guess = nn.Linear(self.features, classes * options.heads)
        self.out = zeroed(nn.Linear(classes * options.heads, self.features))

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        assert y_BY is not None
        h, valid = self._vectors(h_BH), self._valid(y_BY)
        known = y_BY if valid is None else y_BY.masked_fill(~valid, 0)
        logits = self.guess(h).unflatten(-1, (self.heads, self.classes))
        onehot = F.one_hot(known, self.classes).to(logits.dtype).unsqueeze(-2)
        if self.tokens and y_BY.dim() == 1:  # one label for all tokens of a sample
            onehot = onehot.unsqueeze(1)
        difference = (logits.softmax(-1) - onehot).flatten(-2)
        if valid is not None:
            difference = difference * valid.view(*valid.shape, *[1] * (h.dim() - valid.dim()))
        return cast("Tensor", self.out(difference)).view_as(h_BH)
