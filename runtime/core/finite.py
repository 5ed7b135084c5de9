"""Detection of NaN and infinity in tensors, by adding up their values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dni_runtime.core.training import real


def finite(tensor: Tensor) -> bool:
    """Whether all values are finite, and so is their sum; waits for the tensor's device."""
    return all_finite((tensor,))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of several tensors on one device are finite; integers are."""
    inexact = [one for one in tensors if one.is_floating_point() or one.is_complex()]
    floating = [real(one.detach()) for one in inexact]
    dense = [one.coalesce().values() if one.is_sparse else one for one in floating]
    sums = [one.sum(dtype=_wide(one.dtype)) for one in dense]
    return not sums or math.isfinite(sums[0] if len(sums) == 1 else torch.stack(sums).sum())


def state_finite(*modules: nn.Module) -> bool:
    """Whether all parameters and buffers of modules are finite, or masks in buffers."""
    return all_finite(
        one for module in modules for one in module.parameters()
    ) and all_finite_or_masks(one for module in modules for one in module.buffers())


def all_finite_or_masks(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite, or minus infinity, which masks consist of."""
    given = [one for one in tensors if one.is_floating_point() or one.is_complex()]
    return all_finite(given) or all_finite(
        one if one.is_complex() or one.is_sparse else one.masked_fill(one == -math.inf, 0)
        for one in given
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a type whose range fits a sum: float16 ends at 65,504."""
    return torch.float32 if dtype.itemsize < 4 else dtype
