"""Synthesizers with hidden layers: fully connected, and convolutional."""

from __future__ import annotations

import math
from typing import cast

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.synthesizers.base import Synthesizer, zeroed
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
