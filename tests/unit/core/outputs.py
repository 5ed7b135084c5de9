"""Layers with several outputs, for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Fork(nn.Module):
    """Two outputs of different shapes."""

    def __init__(self, features: int = 12, right: int = 6) -> None:
        super().__init__()
        self.left = nn.Linear(features, 8)
        self.right = nn.Linear(features, right)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        right = self.right(x).tanh()
        return self.left(x).tanh(), right.unflatten(1, (2, 3)) if right.shape[1] == 6 else right


class Flat(nn.Module):
    """Several inputs of any shapes, one after the other."""

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.cat([x.reshape(x.shape[0], -1) for x in xs], 1)


class Types(nn.Module):
    """Outputs of two types."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.argmax(1)


class Ends(nn.Module):
    """A last layer with two outputs of two sizes, one of them without features."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x.tanh(), x.sum(1)]


class Columns(nn.Module):
    """A sum of two inputs, each seen as a column: autograd leaves one memory as both gradients."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.unsqueeze(1) + y.unsqueeze(1)).squeeze(1)


class TwoBiases(nn.Module):
    """Two biases, seen as rows: autograd leaves one memory as the gradients of both."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.features, self.outputs = features, outputs
        self.linear = nn.Linear(features, outputs, bias=False)
        self.one, self.other = nn.Parameter(torch.zeros(outputs)), nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (self.one[None] + self.other[None]).squeeze(0)
