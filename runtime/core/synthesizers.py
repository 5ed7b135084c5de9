"""Synthesizers: small networks that predict a module's gradient from its activation (and label).

Jaderberg et al. 2016, section 2.1 (synthetic gradients) and appendix A (conditioning on the label:
cDNI). All but the critic start at zero, so that training starts without a wrong signal; only the
last map and the label's part are zero, which still lets the first gradient through.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.choices import Location, find_class, parse_options
from dni_runtime.core.pooling import Grid
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.named import Frozen

Zeroable = TypeVar("Zeroable", nn.Linear, nn.Conv2d)

LINEAR_UP_TO = 256
"""Features up to which ``auto`` takes a full linear map; above, its cost rivals the module's."""


class LabelTerm(nn.Module):
    """What the label adds to a layer of a synthesizer: a vector per class, or a linear map.

    A one-hot label through a linear map is a row of its matrix, so class labels are looked up.
    """

    def __init__(self, features: int, label: TensorSpec, classes: int | None) -> None:
        super().__init__()
        self.table: nn.Embedding | None = None
        self.map: nn.Linear | None = None
        if classes is not None:
            self.table = nn.Embedding(classes, features)
            nn.init.zeros_(self.table.weight)
        else:
            self.map = nn.Linear(math.prod(label.shape), features, bias=False)
            nn.init.zeros_(self.map.weight)

    def forward(self, y_BY: Tensor) -> Tensor:
        """Give the label's part: (B, features), or (B, T, features) for a label per token."""
        if self.table is not None:
            # Labels that a loss ignores are negative (CrossEntropyLoss: -100).
            return cast("Tensor", self.table(y_BY.clamp_min(0)))
        assert self.map is not None
        return cast("Tensor", self.map(y_BY.flatten(1).to(self.map.weight.dtype)))


class Lesson(NamedTuple):
    """What a synthesizer is to learn from a true gradient.

    Attributes:
        g_BH: The prediction.
        loss: What to descend.
    """

    g_BH: Tensor
    loss: Tensor


class Synthesizer(nn.Module):
    """Base: predicts per-sample gradients in the shape of the activation.

    Args:
        activation: One sample of the activation.
        label: One sample's label, or None when not conditioned.
        classes: Number of classes, when labels are class indices.
        options: The synthesizer's own options.
    """

    Options: ClassVar[type[Frozen]] = Frozen

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: Frozen,
    ) -> None:
        super().__init__()
        self.activation = activation
        # Tokens (T x C) share one map over channels; everything else is one vector.
        self.tokens = len(activation.shape) == 2
        self.features = activation.shape[-1] if self.tokens else math.prod(activation.shape)
        self.label: LabelTerm | None = None
        self._label = label
        self._classes = classes

    def lesson(self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor) -> Lesson:
        """The squared error of the prediction, summed over features and averaged over the batch.

        Args:
            h_BH: The activation, detached.
            y_BY: The labels.
            g_BH: The true per-sample gradient at h.
        """
        predicted_BH = self(h_BH, y_BY)
        return Lesson(predicted_BH, F.mse_loss(predicted_BH, g_BH, reduction="sum") / len(g_BH))

    def _label_term(self, features: int) -> LabelTerm | None:
        return None if self._label is None else LabelTerm(features, self._label, self._classes)

    def _vectors(self, h_BH: Tensor) -> Tensor:
        return h_BH if self.tokens else h_BH.flatten(1)

    def _add_label(self, out: Tensor, y_BY: Tensor | None) -> Tensor:
        if self.label is None or y_BY is None:
            return out
        term: Tensor = self.label(y_BY)
        while term.dim() < out.dim():  # one label for all tokens of a sample
            term = term.unsqueeze(1)
        return out + term


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
        self.out = _zeroed(nn.Linear(self.features, self.features))
        self.label = self._label_term(self.features)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        out = self._add_label(self.out(self._vectors(h_BH)), y_BY)
        return out.view_as(h_BH)


class LowRankOptions(Frozen):
    """Options of the low-rank map.

    Attributes:
        rank: Size of the inner vector.
    """

    rank: int = Field(default=64, ge=1, le=65536)


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
        self.out = _zeroed(nn.Linear(self.inner.out_features, self.features))
        self.label = self._label_term(self.features)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        out = self._add_label(self.out(self.inner(self._vectors(h_BH))), y_BY)
        return out.view_as(h_BH)


class ClassifierOptions(Frozen):
    """Options of the classifier-shaped synthesizer.

    Attributes:
        heads: Number of guesses, each with its own maps.
    """

    heads: int = Field(default=1, ge=1, le=256)


class Classifier(Synthesizer):
    """``g = U (softmax(V h) - onehot(y)) + b``: the gradient of a classifier seen from below.

    The true gradient of a cross-entropy loss starts as softmax minus one-hot at the tail; V guesses
    what the tail will predict from h, U takes the difference back. Two maps to and from the classes
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
        if classes is None or label is None:
            raise ValueError("needs class labels and 'conditioned: true'")
        self.heads, self.classes = options.heads, classes
        self.guess = nn.Linear(self.features, classes * options.heads)
        self.out = _zeroed(nn.Linear(classes * options.heads, self.features))

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        assert y_BY is not None
        h = self._vectors(h_BH)
        if self.tokens and y_BY.dim() == 1:
            y_BY = y_BY.unsqueeze(1).expand(h.shape[:2])
        logits = self.guess(h).unflatten(-1, (self.heads, self.classes))
        known = F.one_hot(y_BY.clamp_min(0), self.classes).to(logits.dtype).unsqueeze(-2)
        difference = (logits.softmax(-1) - known).flatten(-2)
        return cast("Tensor", self.out(difference)).view_as(h_BH)


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
        return self.grid.spread(self._gradient(self.guess(self.grid(h_BH)), y_BY))

    def lesson(self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor) -> Lesson:
        """The label's loss, and the error of its gradient.

        The error is relative to the sizes of both gradients: it is at most 2 whether the true ones
        are still zero, as from a synthesizer downstream that has not learned yet, or already small.
        It is summed up on the grid, where it takes a tenth of the time:
        ``|spread(u) - g|^2 = u . pool(spread(u)) - 2 u . pool(g) + |g|^2``.
        """
        with torch.no_grad():
            z_BF, pooled_BF, true = self.grid(h_BH), self.grid(g_BH), g_BH.square().sum()
        logits_BC = self.guess(z_BF)
        u_BF = self._gradient(logits_BC, y_BY)
        predicted = (u_BF * self.grid.respread(u_BF)).sum()
        size = (predicted.detach() + true).clamp_min(1e-30)
        error = (predicted - 2 * (u_BF * pooled_BF).sum() + true) / size
        loss = error + self.label_weight * F.cross_entropy(logits_BC, y_BY)
        return Lesson(self.grid.spread(u_BF.detach()), loss)

    def _gradient(self, logits_BC: Tensor, y_BY: Tensor) -> Tensor:
        """Per-sample gradient of the classifier's loss at the averages: ``[B, features]``."""
        known = F.one_hot(y_BY.clamp_min(0), logits_BC.shape[1]).to(logits_BC.dtype)
        return (logits_BC.softmax(1) - known) @ self.guess.weight


class _BatchNorm(nn.BatchNorm1d):
    """BatchNorm that takes a batch of one sample by its running statistics."""

    def forward(self, h_BH: Tensor) -> Tensor:
        if len(h_BH) > 1:
            return super().forward(h_BH)
        mean, variance = self.running_mean, self.running_var
        return F.batch_norm(h_BH, mean, variance, self.weight, self.bias, eps=self.eps)


class MLPOptions(Frozen):
    """Options of the multi-layer synthesizer.

    Attributes:
        hidden: Width of the hidden layers.
        depth: Number of hidden layers.
        grid: For feature maps: side of the grid to which they are averaged first, and whose cells
            the prediction fills; the cost falls with its square.
    """

    hidden: int = Field(default=64, ge=1, le=65536)
    depth: int = Field(default=1, ge=1, le=8)
    grid: int = Field(default=7, ge=1, le=256)


class MLP(Synthesizer):
    """Hidden layers with BatchNorm and ReLU, as in the paper's appendix.

    Tokens share one map; feature maps are seen, and predicted, on a coarse grid.
    """

    Options = MLPOptions

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: MLPOptions,
    ) -> None:
        super().__init__(activation, label, classes, options)
        width, features = options.hidden, self.features
        self.grid: tuple[int, int] | None = None
        if len(activation.shape) == 3:
            channels, height, breadth = activation.shape
            self.grid = min(options.grid, height), min(options.grid, breadth)
            features = channels * math.prod(self.grid)
        self.first = nn.Linear(features, width)
        self.label = self._label_term(width)
        norm = nn.LayerNorm if self.tokens else _BatchNorm
        body: list[nn.Module] = [norm(width), nn.ReLU()]
        for _ in range(options.depth - 1):
            body += [nn.Linear(width, width), norm(width), nn.ReLU()]
        self.body = nn.Sequential(*body)
        self.out = _zeroed(nn.Linear(width, features))
        if self.label is not None and self.label.table is not None:
            nn.init.normal_(self.label.table.weight)  # a hidden layer must tell labels apart

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        coarse = h_BH if self.grid is None else F.adaptive_avg_pool2d(h_BH, self.grid)
        hidden = self._add_label(self.first(self._vectors(coarse)), y_BY)
        out = cast("Tensor", self.out(self.body(hidden))).view_as(coarse)
        return out if self.grid is None else F.interpolate(out, h_BH.shape[2:])


class ConvOptions(Frozen):
    """Options of the convolutional synthesizer.

    Attributes:
        hidden: Channels of the hidden layers (default: the activation's).
        depth: Number of hidden layers.
        kernel: Odd size of the kernels.
    """

    hidden: int | None = Field(default=None, ge=1, le=65536)
    depth: int = Field(default=1, ge=1, le=8)
    kernel: int = Field(default=3, ge=1, le=15)


class Conv(Synthesizer):
    """Convolutions over feature maps (C x H x W), with the label added to every place.

    The label reaches the hidden channels (a one-hot plane per class, the paper's appendix, is the
    same as a vector per class added everywhere) and, separately, each output position.
    """

    Options = ConvOptions

    def __init__(
        self,
        activation: TensorSpec,
        label: TensorSpec | None,
        classes: int | None,
        options: ConvOptions,
    ) -> None:
        super().__init__(activation, label, classes, options)
        if len(activation.shape) != 3:
            raise ValueError(f"needs feature maps (C, H, W), not {activation}")
        if options.kernel % 2 == 0:
            raise ValueError(f"kernel {options.kernel} is even; it must be odd to keep the size")
        channels = activation.shape[0]
        width, size = options.hidden or channels, options.kernel
        self.first = nn.Conv2d(channels, width, size, padding=size // 2)
        self.label = self._label_term(width)
        body: list[nn.Module] = [nn.BatchNorm2d(width), nn.ReLU()]
        for _ in range(options.depth - 1):
            body += [nn.Conv2d(width, width, size, padding=size // 2, bias=False)]
            body += [nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*body)
        self.out = _zeroed(nn.Conv2d(width, channels, size, padding=size // 2))
        self.place = self._label_term(self.features)
        if self.label is not None and self.label.table is not None:
            nn.init.normal_(self.label.table.weight)

    def forward(self, h_BH: Tensor, y_BY: Tensor | None) -> Tensor:
        hidden = self.first(h_BH)
        if self.label is not None and y_BY is not None:
            hidden = hidden + self.label(y_BY)[:, :, None, None]
        out = cast("Tensor", self.out(self.body(hidden)))
        if self.place is not None and y_BY is not None:
            out = out + self.place(y_BY).view_as(out)
        return out


SYNTHESIZERS: dict[str, type[Synthesizer]] = {
    "linear": Linear,
    "low-rank": LowRank,
    "classifier": Classifier,
    "critic": Critic,
    "mlp": MLP,
    "conv": Conv,
}


def auto_synthesizer(
    activation: TensorSpec, label: TensorSpec | None, classes: int | None
) -> Choice:
    """The default, by shapes; docs/results.md has the measurements behind it.

    Vectors get a narrow hidden layer. Feature maps and tokens get a critic where each sample has
    one class label. Otherwise maps get a narrow hidden layer; tokens what is shaped like a
    classifier where there are classes, else a linear map, of low rank where it is wide.
    """
    per_sample = classes is not None and label is not None and not label.shape
    if per_sample and len(activation.shape) in (2, 3):
        return Choice(name="critic")
    if len(activation.shape) != 2:
        return Choice(name="mlp")
    if classes is not None and label is not None:
        return Choice(name="classifier")
    return Choice(name="linear" if activation.shape[-1] <= LINEAR_UP_TO else "low-rank")


def build_synthesizer(
    choice: Choice,
    activation: TensorSpec,
    label: TensorSpec | None,
    classes: int | None,
    location: Location = (),
) -> Synthesizer:
    """Make a synthesizer by name or import path.

    Args:
        choice: Its name and options; ``auto`` chooses by the activation's shape.
        activation: One sample of the activation.
        label: One sample's label, or None when not conditioned.
        classes: Number of classes, when labels are class indices.
        location: Where the choice stands in the spec.

    Raises:
        SpecError: Unknown synthesizer, or options that do not fit the activation.
    """
    if choice.name == "auto":
        choice = auto_synthesizer(activation, label, classes)
    cls = find_class(choice.name, "synthesizer", SYNTHESIZERS, Synthesizer, location)
    options = parse_options(cls.Options, choice, location)
    try:
        synthesizer: Synthesizer = cls(activation, label, classes, options)
        return synthesizer
    except (ValueError, RuntimeError) as error:
        raise SpecError(
            f"synthesizer {choice.name!r} {error}", location=(*location, choice.name)
        ) from None


def _zeroed(layer: Zeroable) -> Zeroable:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
