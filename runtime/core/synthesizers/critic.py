"""A synthesizer that is a classifier: what it predicts is the gradient of its own loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.pooling import Grid
from dni_runtime.core.synthesizers.base import Lesson, Synthesizer
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.named import Frozen


class CriticOptions(Frozen):
    """Options of the critic.

    Attributes:
        grid: Side of the grid to which feature maps are averaged first; of tokens, their number.
        label_weight: Weight of the label's loss beside the error of the gradient.
    """

    grid: int = Field(default=7, ge=1, le=256)
    label_weight: float = Field(default=1.0, ge=0)


class Critic(Synthesizer):
    """The gradient of a small classifier's own loss: ``g = d CE(V pool(h) + b, y) / dh``.

    The classifier learns from the label, as a local head does, and from the error of its gradient
    (Sobolev Training, Czarnecki et al. 2017, arXiv:1706.04859, sec. 4.3).
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
        if classes is None or label is None:
            raise ValueError("needs class labels and 'conditioned: true'")
        if label.shape:
            raise ValueError(f"needs one label for a sample, not {label}")
        self.label_weight = options.label_weight
        self.grid = Grid(activation, options.grid)
        self.guess = nn.Linear(self.grid.features, classes)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        assert y_BY is not None
        return self.grid.spread(
            self._difference(self.guess(self.grid(h_BH)), y_BY) @ self.guess.weight
        )

    def lesson(self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor) -> Lesson:
        """The label's loss, and the error of its gradient.

        The error is relative to the sizes of both gradients: it is at most 2 whether the true ones
        are still zero, as from a synthesizer downstream that has not learned yet, or already small.
        It is summed up over classes, where it takes a small part of the time. With ``d`` the
        difference of guess and label and ``V`` the map, ``u = d V``, and ``|spread(u) - g|^2 =
        d V pool(spread(V^T)) d^T - 2 d (pool(g) V^T)^T + |g|^2``, for each sample.
        """
        with torch.no_grad():
            z_BF, pooled_BF, true = self.grid(h_BH), self.grid(g_BH), g_BH.square().sum()
        logits_BC, map_CF = self.guess(z_BF), self.guess.weight
        d_BC = self._difference(logits_BC, y_BY)
        predicted = (d_BC @ (map_CF @ self.grid.respread(map_CF).mT) * d_BC).sum()
        size = (predicted.detach() + true).clamp_min(1e-30)
        error = (predicted - 2 * (d_BC * (pooled_BF @ map_CF.mT)).sum() + true) / size
        return Lesson(None, error + self.label_weight * F.cross_entropy(logits_BC, y_BY))

    def _difference(self, logits_BC: Tensor, y_BY: Tensor) -> Tensor:
        """Per-sample gradient of the classifier's loss at its guess: ``[B, classes]``."""
        known = F.one_hot(y_BY.clamp_min(0), logits_BC.shape[1]).to(logits_BC.dtype)
        return logits_BC.softmax(1) - known
