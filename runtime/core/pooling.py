"""Activations seen from a distance: averaged to a grid of few places, as one vector."""

from __future__ import annotations

import math

from torch import nn

from dni_runtime.spec import TensorSpec


def pooling(activation: TensorSpec, grid: int) -> tuple[list[nn.Module], int]:
    """Layers that average an activation to a vector, and that vector's length.

    Args:
        activation: One sample. Feature maps (C x H x W) are averaged to ``grid`` x ``grid`` places,
            tokens (T x C) to ``grid``, each where there are more; others are flattened only.
        grid: Places along a side.
    """
    shape = activation.shape
    if len(shape) == 1:
        return [], shape[0]
    if len(shape) not in (2, 3):
        return [nn.Flatten()], math.prod(shape)
    *maps, height, breadth = shape
    size = min(grid, height), min(grid, breadth) if maps else breadth
    pool = [] if size == (height, breadth) else [nn.AdaptiveAvgPool2d(size)]
    return [*pool, nn.Flatten()], math.prod((*maps, *size))
