"""Activations averaged to a grid of few places, as one vector."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.spec import TensorSpec


class Axis(nn.Module):
    """Averages neighbours along one dimension, and spreads averages back.

    Equal blocks are added up slice by slice: on a CPU that takes a quarter to a half of the time of
    torch's pooling, or of a product. If blocks overlap, there is a product with a matrix. The
    dimension is counted from the last (-1 or -2), and has more than ``places`` values.
    """

    matrix: Tensor | None  # [places, size]

    def __init__(self, dim: int, size: int, places: int) -> None:
        super().__init__()
        self.dim = dim
        self.block = size // places
        matrix = None
        if size % places:
            matrix = F.adaptive_avg_pool1d(torch.eye(size), places).T.contiguous()
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Average ``size`` values to ``places``."""
        if self.matrix is not None:
            return self._times(self.matrix.mT, h)
        total = self._slice(h, 0) + self._slice(h, 1)
        for index in range(2, self.block):
            total += self._slice(h, index)
        return total.div_(self.block)

    def spread(self, u: Tensor) -> Tensor:
        """Apply the transposed map, ``places`` values to ``size``."""
        if self.matrix is not None:
            return self._times(self.matrix, u)
        u = u / self.block
        if self.dim == -1:
            return u.repeat_interleave(self.block, -1)
        return torch.stack([u] * self.block, self.dim).flatten(self.dim - 1, self.dim)

    def respread(self, u: Tensor) -> Tensor:
        """Return the averages of the result of :meth:`spread`, without computing that."""
        if self.matrix is not None:
            return self._times(self.matrix @ self.matrix.mT, u)
        return u / self.block

    def _slice(self, h: Tensor, index: int) -> Tensor:
        """Return the value at ``index`` of each block."""
        return h[..., index :: self.block] if self.dim == -1 else h[..., index :: self.block, :]

    def _times(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Return the product that maps the dimension from ``matrix``'s rows to its columns."""
        return x @ matrix if self.dim == -1 else torch.matmul(matrix.mT, x)


class Grid(nn.Module):
    """Averages activations to few places, as ``AdaptiveAvgPool2d`` does, and back.

    Feature maps (C x H x W) are averaged to ``places`` x ``places``, tokens (T x C) to ``places``,
    if there are more; others are only flattened.
    """

    def __init__(self, activation: TensorSpec, places: int) -> None:
        super().__init__()
        shape = list(activation.shape)
        sides = {2: [-2], 3: [-2, -1]}.get(len(shape), [])
        self.axes = nn.ModuleList(
            [Axis(dim, shape[dim], places) for dim in sides if shape[dim] > places]
        )
        for axis in self._axes:
            shape[axis.dim] = places
        self._grid = tuple(shape)
        self.features = math.prod(shape)

    @property
    def _axes(self) -> list[Axis]:
        return cast("list[Axis]", list(self.axes))

    def forward(self, h_BH: Tensor) -> Tensor:
        """Return the averages: ``[B, features]``."""
        if not self.axes:
            return h_BH.flatten(1)
        return cast("Tensor", _Average.apply(h_BH, self))  # type: ignore[no-untyped-call]

    def spread(self, u_BF: Tensor) -> Tensor:
        """Return the gradient at the activation, given that at the averages (transposed map)."""
        u_BG = u_BF.view(-1, *self._grid)
        for axis in reversed(self._axes):
            u_BG = axis.spread(u_BG)
        return u_BG

    def respread(self, u_BF: Tensor) -> Tensor:
        """Return the averages of the result of :meth:`spread`, without computing that."""
        u_BG = u_BF.view(-1, *self._grid)
        for axis in self._axes:
            u_BG = axis.respread(u_BG)
        return u_BG.flatten(1)


class Tokens(nn.Module):
    """Passes each token of a sample (T x C) on by itself; :class:`Grid` averages a sample."""

    def __init__(self, activation: TensorSpec) -> None:
        super().__init__()
        self._shape = activation.shape
        self.features = activation.shape[-1]

    def forward(self, h_BTC: Tensor) -> Tensor:
        """Return the tokens of all samples in a row: ``[N, features]``."""
        return h_BTC.flatten(0, 1)

    def spread(self, u_NF: Tensor) -> Tensor:
        """Return the gradient at the activation, given that at the tokens."""
        return u_NF.view(-1, *self._shape)

    def respread(self, u_NF: Tensor) -> Tensor:
        """Return the argument: nothing is averaged."""
        return u_NF


class _Average(torch.autograd.Function):
    """A grid's averages; autograd through each slice would take many times as long."""

    @staticmethod
    def forward(ctx: Any, h_BH: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        for axis in grid.axes:
            h_BH = axis(h_BH)
        return h_BH.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.spread(grads[0]), None
