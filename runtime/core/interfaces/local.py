"""``local``: an auxiliary head with its own loss.

Decoupled greedy learning (Belilovsky et al. 2020, arXiv:1901.08164).
The head is also an early exit for inference.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.interfaces.base import Boundary, GradientInterface, Signal, Wanted
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.pooling import Grid
from dni_runtime.core.training import build_optimizer
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.named import Frozen


class LocalOptions(Frozen):
    """Options of the local gradient interface.

    Attributes:
        hidden: Width of a hidden layer in the head, or None for a linear head.
        pool: Side of the grid to which feature maps are averaged before the head; of tokens, their
            number (not for a prediction per token).
        optimizer: The head's optimizer (default: the module's).
    """

    hidden: int | None = Field(default=None, ge=1, le=65536)
    pool: int = Field(default=7, ge=1, le=64)
    optimizer: Choice | None = None


class Local(GradientInterface):
    """The gradient of a local loss; nothing comes from downstream."""

    Options = LocalOptions

    def __init__(self, boundary: Boundary, options: LocalOptions) -> None:
        super().__init__(boundary, options)
        self.loss = ChainLoss(boundary.loss, boundary.prediction, boundary.label)
        self.head = build_head(
            boundary.activation, boundary.prediction, options, self.loss.class_axis
        )
        own = options.optimizer
        try:
            self._optimizer = build_optimizer(
                own or boundary.optimizer, self.head.parameters(), ("optimizer",)
            )
        except SpecError as error:
            hint = "the early head takes the module's optimizer unless 'optimizer' names one for it"
            raise SpecError(
                error.message, location=error.location, hint=error.hint if own else hint
            ) from None

    @classmethod
    def wants(cls, options: LocalOptions) -> Wanted:
        return Wanted(0)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        h_BH = h_BH.detach().requires_grad_()
        p_BP = self.head(h_BH)
        loss = self.loss(p_BP, y_BY)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        assert h_BH.grad is not None
        return Signal(h_BH.grad.mul_(len(h_BH)), loss.detach(), p_BP.detach())

    def predict(self, h_BH: Tensor) -> Tensor:
        self.head.eval()
        try:
            with torch.no_grad():
                return cast("Tensor", self.head(h_BH))
        finally:
            self.head.train()

    def optimizers(self) -> dict[str, Any]:
        return {"head": self._optimizer}


def build_head(
    activation: TensorSpec,
    prediction: TensorSpec,
    options: LocalOptions,
    class_axis: int | None = None,
) -> nn.Sequential:
    """An auxiliary head from an activation to the chain's prediction.

    Linear, or with a hidden layer. Maps (C x H x W) and tokens (T x C) are averaged to a grid
    first; where each token has a prediction of its own, the head is applied to each token.

    Args:
        activation: One sample of the activation.
        prediction: One sample at the chain's output.
        options: The head's size.
        class_axis: The axis of a batch of predictions that holds the classes, where one does.

    Raises:
        SpecError: The prediction has a shape that no such head produces.
    """
    if len(activation.shape) == 2 and len(prediction.shape) == 2:
        return _token_head(activation, prediction, options, classes_second=class_axis == 1)
    grid = Grid(activation, options.pool)
    layers: list[nn.Module] = [grid]
    features = grid.features
    if options.hidden:
        layers += [nn.Linear(features, options.hidden), nn.BatchNorm1d(options.hidden), nn.ReLU()]
        features = options.hidden
    layers.append(nn.Linear(features, math.prod(prediction.shape)))
    if len(prediction.shape) != 1:
        layers.append(nn.Unflatten(1, prediction.shape))
    return nn.Sequential(*layers)


def _token_head(
    activation: TensorSpec,
    prediction: TensorSpec,
    options: LocalOptions,
    *,
    classes_second: bool,
) -> nn.Sequential:
    """A head on each token: LayerNorm, and a linear map or one hidden layer with GELU."""
    tokens, features = activation.shape
    numbers, predicted = prediction.shape if classes_second else prediction.shape[::-1]
    if predicted != tokens:
        raise SpecError(
            f"no local head from {tokens} tokens, {activation}, to predictions of {predicted}, "
            f"{prediction}",
            hint="cut the chain where there is a token for each prediction, use 'synthetic', or "
            "bring your own interface by import path",
        )
    layers: list[nn.Module] = [nn.LayerNorm(features)]
    if options.hidden:
        layers += [nn.Linear(features, options.hidden), nn.GELU()]
        features = options.hidden
    layers.append(nn.Linear(features, numbers))
    if classes_second:
        layers.append(_Transpose())
    return nn.Sequential(*layers)


class _Transpose(nn.Module):
    """From tokens first to torch's layout, classes first."""

    def forward(self, p_BTV: Tensor) -> Tensor:
        return p_BTV.mT
