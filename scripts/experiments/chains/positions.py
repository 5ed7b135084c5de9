"""A layer of one's own, which chains name by its import path."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Positions(nn.Module):
    """Adds to each token a vector that its place has learned."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.places_TC = nn.Parameter(0.02 * torch.randn(tokens, channels))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC + self.places_TC
