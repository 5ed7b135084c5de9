"""Detection of NaN and infinity in tensors: by their sum, and where that is not finite by each."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dni_runtime.core.training import real


def finite(tensor: Tensor) -> bool:
    """Whether all values are finite; waits for the tensor's device."""
    return all_finite((tensor,))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of several tensors on one device are finite; integers are."""
    values = []
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            value = real(tensor.detach())
            values.append(value.coalesce().values() if value.is_sparse else value)
    sums = [value.sum(dtype=_wide(value.dtype)) for value in values]
    if not sums or math.isfinite(sums[0] if len(sums) == 1 else torch.stack(sums).sum()):
        return True
    return all(bool(value.isfinite().all()) for value in values)  # masks of a type's least number


def state_finite(*modules: nn.Module) -> bool:
    """Whether all parameters and buffers of modules are finite, or masks in buffers."""
    return all_finite(
        tensor for module in modules for tensor in module.parameters()
    ) and all_finite_or_masks(tensor for module in modules for tensor in module.buffers())


def all_finite_or_masks(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite, or minus infinity, which masks consist of."""
    inexact = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return all_finite(inexact) or all_finite(
        tensor
        if tensor.is_complex() or tensor.is_sparse
        else tensor.masked_fill(tensor == -math.inf, 0)
        for tensor in inexact
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a type whose range fits a sum: float16 ends at 65,504."""
    return torch.float32 if dtype.itemsize < 4 else dtype
