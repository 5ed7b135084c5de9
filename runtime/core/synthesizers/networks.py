"""Synthesizers with hidden layers: fully connected, and convolutional."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.losses import ChainLoss, cross_entropy
from dni_runtime.core.pooling import Grid, Tokens
from dni_runtime.core.synthesizers.base import Lesson, Synthesizer, zeroed
from dni_runtime.spec.named import Frozen


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm that uses its running statistics for a batch of one sample."""

    def forward(self, h_BH: Tensor) -> Tensor:
        if len(h_BH) > 1:
            return super().forward(h_BH)
        mean, variance = self.running_mean, self.running_var
        return F.batch_norm(h_BH, mean, variance, self.weight, self.bias, eps=self.eps)


class MLPOptions(Frozen):
    """Options of the multi-layer synthesizer."""

    hidden: int = Field(default=64, ge=1, le=65536)  # width of the hidden layers
    depth: int = Field(default=1, ge=1, le=8)  # hidden layers
    # For feature maps: side of the grid to which they are averaged first, and whose cells the
    # prediction fills; the cost falls with its square.
    grid: int = Field(default=7, ge=1, le=256)


class MLP(Synthesizer):
    """Hidden layers with BatchNorm and ReLU, as in the paper's appendix.

    Tokens share one map; feature maps are seen, and predicted, on a coarse grid.
    """

    Options = MLPOptions

    def build(self, options: MLPOptions) -> None:
        width, features = options.hidden, self.features
        self.grid: tuple[int, int] | None = None
        if len(self.activation.shape) == 3:
            channels, height, breadth = self.activation.shape
            self.grid = min(options.grid, height), min(options.grid, breadth)
            features = channels * math.prod(self.grid)
        self.first = nn.Linear(features, width)
        self.label = self._label_term(width)
        norm = nn.LayerNorm if self.tokens else BatchNorm
        body: list[nn.Module] = [norm(width), nn.ReLU()]
        for _ in range(options.depth - 1):
            body += [nn.Linear(width, width), norm(width), nn.ReLU()]
        self.body = nn.Sequential(*body)
        self.out = zeroed(nn.Linear(width, features))
        if self.label is not None and self.label.table is not None:
            nn.init.normal_(self.label.table.weight)  # a hidden layer must tell labels apart

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        coarse = h_BH if self.grid is None else F.adaptive_avg_pool2d(h_BH, self.grid)
        hidden = self._add_label(self.first(self._vectors(coarse)), y_BY)
        out = cast("Tensor", self.out(self.body(hidden))).view_as(coarse)
        return out if self.grid is None else F.interpolate(out, h_BH.shape[2:])


class ConvOptions(Frozen):
    """Options of the convolutional synthesizer."""

    # Channels of the hidden layers; None: the activation's.
    hidden: int | None = Field(default=None, ge=1, le=65536)
    depth: int = Field(default=1, ge=1, le=8)  # hidden layers
    kernel: int = Field(default=3, ge=1, le=15)  # odd


class Conv(Synthesizer):
    """Convolutions over feature maps (C x H x W), with the label added to every place.

    The label reaches the hidden channels (a one-hot plane per class, the paper's appendix, is the
    same as a vector per class added everywhere) and, separately, each output position.
    """

    Options = ConvOptions

    def build(self, options: ConvOptions) -> None:
        if len(self.activation.shape) != 3:
            raise ValueError(f"needs feature maps (C, H, W), not {self.activation}")
        if options.kernel % 2 == 0:
            raise ValueError(f"kernel {options.kernel} is even; it must be odd to keep the size")
        channels = self.activation.shape[0]
        width, size = options.hidden or channels, options.kernel
        self.first = nn.Conv2d(channels, width, size, padding=size // 2)
        self.label = self._label_term(width)
        body: list[nn.Module] = [nn.BatchNorm2d(width), nn.ReLU()]
        for _ in range(options.depth - 1):
            body += [nn.Conv2d(width, width, size, padding=size // 2, bias=False)]
            body += [nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*body)
        self.out = zeroed(nn.Conv2d(width, channels, size, padding=size // 2))
        self.place = self._label_term(self.features)
        if self.label is not None and self.label.table is not None:
            nn.init.normal_(self.label.table.weight)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        hidden, valid = self.first(h_BH), None if y_BY is None else self._valid(y_BY)
        if self.label is not None and y_BY is not None:
            hidden = hidden + self.label(y_BY, valid)[:, :, None, None]
        out = cast("Tensor", self.out(self.body(hidden)))
        if self.place is not None and y_BY is not None:
            out = out + self.place(y_BY, valid).view_as(out)
        return out


class Linear(Synthesizer):
    """``g = W h + E[y] + b`` (the paper's "linear" model): exact for a linear tail with MSE."""

    def build(self, options: Frozen) -> None:
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

    def build(self, options: LowRankOptions) -> None:
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

    def build(self, options: ClassifierOptions) -> None:
        self.heads, self.classes = options.heads, self._one_class_each()
        self.guess = nn.Linear(self.features, self.classes * options.heads)
        self.out = zeroed(nn.Linear(self.classes * options.heads, self.features))

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

    def build(self, options: CriticOptions) -> None:
        classes = self._one_class_each()
        self.label_weight = options.label_weight
        shape = self.activation
        self.grid = Tokens(shape) if self.per_token else Grid(shape, options.grid)
        self.guess = nn.Linear(self.grid.features, classes)
        self.label_loss = cross_entropy(classes)

    def set_loss(self, loss: ChainLoss) -> None:
        super().set_loss(loss)
        self.label_loss = loss.on_scores(self.guess.out_features)

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
        return Lesson(None, error + self.label_weight * self.label_loss(scores_NC, y_BY.flatten()))

    def _difference(self, scores_NC: Tensor, y_BY: Tensor) -> Tensor:
        """Per-sample gradient of the classifier's loss at its guess: ``[N, classes]``."""
        d_NC = self.label_loss.difference(scores_NC, y_BY.flatten())
        return d_NC if y_BY.dim() == 1 else d_NC * (len(y_BY) / y_BY.numel())
