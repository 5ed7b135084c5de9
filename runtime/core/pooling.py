"""Activations seen from a distance: averaged to a grid of few places, as one vector."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.spec import TensorSpec


class Grid(nn.Module):
    """Averages activations to few places, as ``AdaptiveAvgPool2d`` does, and back.

    Products with small matrices: on a CPU they take a third of the time of torch's pooling.

    Args:
        activation: One sample. Feature maps (C x H x W) are averaged to ``places`` x ``places``,
            tokens (T x C) to ``places``, each where there are more; others are flattened only.
        places: Places along a side.

    Attributes:
        features: Length of the vector.
    """

    rows: Tensor | None  # [places, H]
    columns: Tensor | None  # [places, W]

    def __init__(self, activation: TensorSpec, places: int) -> None:
        super().__init__()
        *channels, height, width = (1, 1, *activation.shape)
        maps, tokens = len(activation.shape) == 3, len(activation.shape) == 2
        self.register_buffer(
            "rows", _means(height, places) if maps or tokens else None, persistent=False
        )
        self.register_buffer("columns", _means(width, places) if maps else None, persistent=False)
        self._grid = activation.shape
        if maps:
            self._grid = (*channels[2:], min(places, height), min(places, width))
        elif tokens:
            self._grid = (min(places, height), width)
        self.features = math.prod(self._grid)

    def forward(self, h_BH: Tensor) -> Tensor:
        """The averages: ``[B, features]``."""
        if self.rows is not None:
            h_BH = self.rows @ h_BH
        if self.columns is not None:
            h_BH = h_BH @ self.columns.mT
        return h_BH.flatten(1)

    def spread(self, u_BF: Tensor) -> Tensor:
        """The gradient at the activation, from that at the averages (the transposed map)."""
        u_BF = u_BF.view(-1, *self._grid)
        if self.columns is not None:
            u_BF = u_BF @ self.columns
        return u_BF if self.rows is None else torch.matmul(self.rows.mT, u_BF)

    def respread(self, u_BF: Tensor) -> Tensor:
        """The averages of what :meth:`spread` gives, without making it."""
        u_BF = u_BF.view(-1, *self._grid)
        if self.columns is not None:
            u_BF = u_BF @ (self.columns @ self.columns.mT)
        if self.rows is not None:
            u_BF = torch.matmul(self.rows @ self.rows.mT, u_BF)
        return u_BF.flatten(1)


def _means(size: int, places: int) -> Tensor | None:
    """The matrix ``[places, size]`` that averages so many values; None where all are kept."""
    if size <= places:
        return None
    return F.adaptive_avg_pool1d(torch.eye(size), places).T.contiguous()
