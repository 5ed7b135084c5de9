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

from dni_runtime.core.interfaces.base import Boundary, GradientInterface, Signal
from dni_runtime.core.training import build_loss, build_optimizer
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.model import Frozen


class LocalOptions(Frozen):
    """Options of the local gradient interface.

    Attributes:
        hidden: Width of a hidden layer in the head, or None for a linear head.
        pool: Side of the grid to which feature maps are averaged before the head.
        optimizer: The head's optimizer (default: the module's).
    """

    hidden: int | None = Field(default=None, ge=1, le=65536)
    pool: int = Field(default=2, ge=1, le=64)
    optimizer: Choice | None = None


class Local(GradientInterface):
    """The gradient of a local loss; nothing comes from downstream."""

    Options = LocalOptions

    def __init__(self, boundary: Boundary, options: LocalOptions) -> None:
        super().__init__(boundary, options)
        self.head = build_head(boundary.activation, boundary.prediction, options)
        self.loss = build_loss(boundary.loss)
        self._optimizer = build_optimizer(
            options.optimizer or boundary.optimizer, self.head.parameters(), ("optimizer",)
        )

    @classmethod
    def gradient_every(cls, options: LocalOptions) -> int:
        return 0

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
    activation: TensorSpec, prediction: TensorSpec, options: LocalOptions
) -> nn.Sequential:
    """An auxiliary head from an activation to the chain's prediction.

    Vectors: linear. Maps (C x H x W): averaged to a small grid, then linear. Tokens (T x C): linear
    per token where the prediction is per token, else over their mean.

    Raises:
        SpecError: The prediction has a shape that no such head produces.
    """
    shape, outputs = activation.shape, math.prod(prediction.shape)
    layers: list[nn.Module] = []
    if len(shape) == 3:
        grid = min(options.pool, *shape[1:])
        layers += [nn.AdaptiveAvgPool2d(grid), nn.Flatten()]
        features = shape[0] * grid * grid
    elif len(shape) == 2 and len(prediction.shape) == 2:
        raise SpecError(
            f"no local head from {activation} to a prediction per token, {prediction}",
            hint="bring your own interface by import path, or use 'synthetic'",
        )
    elif len(shape) == 2:
        layers += [_MeanTokens()]
        features = shape[1]
    else:
        layers += [nn.Flatten()] if len(shape) > 1 else []
        features = math.prod(shape)
    if options.hidden:
        layers += [nn.Linear(features, options.hidden), nn.BatchNorm1d(options.hidden), nn.ReLU()]
        features = options.hidden
    layers.append(nn.Linear(features, outputs))
    if len(prediction.shape) != 1:
        layers.append(nn.Unflatten(1, prediction.shape))
    return nn.Sequential(*layers)


class _MeanTokens(nn.Module):
    def forward(self, h_BTC: Tensor) -> Tensor:
        return h_BTC.mean(1)
