"""A synthesizer that is a classifier: it predicts the gradient of its own loss."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.losses import ChainLoss, cross_entropy
from dni_runtime.core.pooling import Grid, Tokens
from dni_runtime.core.synthesizers.base import Lesson, Synthesizer
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.named import Frozen


class CriticOptions(Frozen):
    """Options of the critic."""

    # Side of the grid to which feature maps are averaged first; of tokens, their number (not with a
    # label per token).
    grid: int = Field(default=7, ge=1, le=256)
    # Of the label's loss, beside the error of the gradient.
    label_weight: float = Field(default=1.0, ge=0)


class Critic(Synthesizer):
    """The gradient of a small classifier's own loss: ``g = d CE(V pool(h) + b, y) / dh``.

    With a label per token it guesses each token's by itself. The classifier's loss has the chain's
    ignored label, weights and smoothing. It learns from the label, as a local head does, and from
    the error of its gradient (Sobolev Training, Czarnecki et al. 2017, arXiv:1706.04859, sec. 4.3).
    Either alone teaches the module less than both (docs/results.md, Convolutions).
    """

    Options = CriticOptions

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: CriticOptions,
    ) -> None:
        super().__init__(activation, label, classes, options)
        self._refuse_other_labels()
        assert classes is not None
        self.label_weight = options.label_weight
        self.grid = Tokens(activation) if self.per_token else Grid(activation, options.grid)
        self.guess = nn.Linear(self.grid.features, classes)
        self.own = cross_entropy(classes)

    def set_loss(self, loss: ChainLoss) -> None:
        super().set_loss(loss)
        self.own = loss.on_scores(self.guess.out_features)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        assert y_BY is not None
        scores_NC = self.guess(self.grid(h_BH))
        return self.grid.spread(self._difference(scores_NC, y_BY) @ self.guess.weight)

    def lesson(self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor) -> Lesson:
        """The label's loss, and the error of its gradient.

        The error is relative to the sizes of both gradients: it is at most 2 even if the true ones
        are still zero, as from a synthesizer downstream that has not learned yet, or already small.
        It is computed over classes, in a small part of the time. With ``d`` the
        difference of guess and label and ``V`` the map, ``u = d V``, and ``|spread(u) - g|^2 =
        d V pool(spread(V^T)) d^T - 2 d (pool(g) V^T)^T + |g|^2``, for each sample.
        """
        with torch.no_grad():
            z_NF, pooled_NF, true = self.grid(h_BH), self.grid(g_BH), g_BH.square().sum()
        scores_NC, map_CF = self.guess(z_NF), self.guess.weight
        d_NC = self._difference(scores_NC, y_BY)
        predicted = (d_NC @ (map_CF @ self.grid.respread(map_CF).mT) * d_NC).sum()
        size = (predicted.detach() + true).clamp_min(1e-30)
        error = (predicted - 2 * (d_NC * (pooled_NF @ map_CF.mT)).sum() + true) / size
        return Lesson(None, error + self.label_weight * self.own(scores_NC, y_BY.flatten()))

    def _difference(self, scores_NC: Tensor, y_BY: Tensor) -> Tensor:
        """Per-sample gradient of the classifier's loss at its guess: ``[N, classes]``."""
        d_NC = self.own.difference(scores_NC, y_BY.flatten())
        return d_NC if y_BY.dim() == 1 else d_NC * (len(y_BY) / y_BY.numel())
