"""``local``: an auxiliary head with its own loss.

Decoupled greedy learning (Belilovsky et al. 2020, arXiv:1901.08164).
The head is also an early exit for inference.

Shape suffixes: B samples, T tokens, C channels, V scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.finite import finite
from dni_runtime.core.interfaces.base import Boundary, GradientInterface, Needs, Signal, as_in
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.pooling import Grid
from dni_runtime.core.synthesizers.networks import BatchNorm
from dni_runtime.core.training import build_optimizer
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.named import Frozen

REDUCED = 4
"""``mlp-sr``: a map's side is averaged to a quarter first."""

PLACES = 2
"""``mlp-sr``: side of the grid in front of the linear layers; of tokens there are its square."""

DEPTH = 3
"""``mlp-sr``: convolutions, and linear layers, the output's among them."""


class HeadOptions(Frozen):
    """Options of a head."""

    # ``mlp-sr``: 1 x 1 convolutions on a reduced map and three linear layers (MLP-SR-aux,
    # Belilovsky et al. 2020, sec. 4.1).
    head: Literal["linear", "mlp-sr"] = "linear"
    # ``linear``: width of a hidden layer; None: there is none. ``mlp-sr``: width of its linear
    # layers; None: as many as they have inputs.
    hidden: int | None = Field(default=None, ge=1, le=65536)
    # ``linear``: side of the grid to which feature maps are averaged before the head; of tokens,
    # their number (not for a prediction per token).
    pool: int = Field(default=7, ge=1, le=64)


def build_head(
    activation: TensorSpec,
    prediction: TensorSpec,
    options: HeadOptions,
    class_axis: int | None = None,  # of a batch of predictions
) -> nn.Sequential:
    """Build an auxiliary head from an activation to the chain's prediction.

    Maps (C x H x W) and tokens (T x C) are averaged to fewer places first; if each token has a
    prediction of its own, the head is applied to each token.
    """
    if len(activation.shape) == 2 and len(prediction.shape) == 2:
        return _token_head(activation, prediction, options, classes_second=class_axis == 1)
    build = _mlp_sr if options.head == "mlp-sr" else _linear
    features, layers = build(activation, options)
    layers.append(nn.Linear(features, math.prod(prediction.shape)))
    if len(prediction.shape) != 1:
        layers.append(nn.Unflatten(1, prediction.shape))
    return nn.Sequential(*layers)


def _linear(activation: TensorSpec, options: HeadOptions) -> tuple[int, list[nn.Module]]:
    """Return the number of features in front of the output layer, and what computes them."""
    grid = Grid(activation, options.pool)
    layers: list[nn.Module] = [grid]
    features = grid.features
    if options.hidden is None:
        return features, layers
    return options.hidden, [*layers, *_hidden_layers(features, options.hidden, 1, _batch_norm)]


def _mlp_sr(activation: TensorSpec, options: HeadOptions) -> tuple[int, list[nn.Module]]:
    """The same for the head of decoupled greedy learning."""
    layers: list[nn.Module] = []
    features = math.prod(activation.shape)
    size: tuple[int, ...] = ()
    if len(activation.shape) == 3:
        channels, size = activation.shape[0], activation.shape[1:]
        last = tuple(min(PLACES, side) for side in size)
    elif len(activation.shape) == 2:
        tokens, channels = activation.shape
        layers.append(_ChannelsFirst())
        size, last = (tokens, 1), (min(PLACES * PLACES, tokens), 1)
    if size:
        reduced = tuple(
            max(-(-side // REDUCED), least) for side, least in zip(size, last, strict=True)
        )
        layers.append(nn.AdaptiveAvgPool2d(reduced))
        for _ in range(DEPTH):
            layers += [nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels)]
            layers.append(nn.ReLU())
        layers.append(nn.AdaptiveAvgPool2d(last))
        features = channels * math.prod(last)
    layers.append(nn.Flatten())
    width = options.hidden or features
    return width, [*layers, *_hidden_layers(features, width, DEPTH - 1, _batch_norm)]


def _token_head(
    activation: TensorSpec,
    prediction: TensorSpec,
    options: HeadOptions,
    *,
    classes_second: bool,
) -> nn.Sequential:
    """A head on each token: LayerNorm, hidden layers with GELU if there are any, a linear map."""
    tokens, features = activation.shape
    numbers, predicted = prediction.shape if classes_second else prediction.shape[::-1]
    if predicted != tokens:
        raise SpecError(
            f"cannot build a local head from {tokens} tokens, {activation}, to {predicted} "
            f"predictions, {prediction}",
            hint="cut the chain where there is a token for each prediction, use 'synthetic', or "
            "bring your own interface by import path",
        )
    depth = DEPTH - 1 if options.head == "mlp-sr" else int(options.hidden is not None)
    width = options.hidden or features
    layers: list[nn.Module] = [nn.LayerNorm(features)]
    layers += _hidden_layers(features, width, depth, lambda width: [nn.GELU()])
    layers.append(nn.Linear(width if depth else features, numbers))
    if classes_second:
        layers.append(_Transpose())
    return nn.Sequential(*layers)


def _hidden_layers(
    features: int, width: int, depth: int, activation: Callable[[int], list[nn.Module]]
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(features, width), *activation(width)]
        features = width
    return layers


def _batch_norm(width: int) -> list[nn.Module]:
    return [BatchNorm(width), nn.ReLU()]


class _ChannelsFirst(nn.Module):
    """Tokens as maps of one column."""

    def forward(self, h_BTC: Tensor) -> Tensor:
        return h_BTC.mT.unsqueeze(-1)


class _Transpose(nn.Module):
    """From tokens first to torch's layout, classes first."""

    def forward(self, p_BTV: Tensor) -> Tensor:
        return p_BTV.mT


class LocalOptions(HeadOptions):
    """Options of the local gradient interface."""

    optimizer: Choice | None = None  # the head's; None: the module's


class Local(GradientInterface):
    """The gradient of a local loss; nothing comes from downstream."""

    Options = LocalOptions

    def __init__(self, boundary: Boundary, options: LocalOptions) -> None:
        super().__init__(boundary, options)
        self.loss = ChainLoss(boundary.loss, boundary.prediction, boundary.label)
        self.head = build_head(
            boundary.activation, boundary.prediction, options, self.loss.class_axis
        )
        trained = list(self.head.parameters())
        optimizer = options.optimizer
        try:
            self._optimizer = build_optimizer(
                optimizer or boundary.optimizer, trained, ("optimizer",)
            )
        except SpecError as error:
            hint = "the early head uses the module's optimizer unless 'optimizer' names one for it"
            raise SpecError(
                error.message, location=error.location, hint=error.hint if optimizer else hint
            ) from None

    @classmethod
    def needs(cls, options: LocalOptions) -> Needs:
        return Needs(0)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        dtype, h_BH = h_BH.dtype, as_in(self.head, h_BH.detach()).requires_grad_()
        p_BP = self.head(h_BH)
        loss = self.loss(p_BP, y_BY)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not self.checks or finite(loss):
            self._optimizer.step()
        assert h_BH.grad is not None
        return Signal(h_BH.grad.mul_(len(h_BH)).to(dtype), loss.detach(), p_BP.detach())

    def predict(self, h_BH: Tensor) -> Tensor:
        self.head.eval()
        try:
            with torch.no_grad():
                p_BP: Tensor = self.head(as_in(self.head, h_BH))
                return p_BP
        finally:
            self.head.train()

    def optimizers(self) -> dict[str, Any]:
        return {"head": self._optimizer}
