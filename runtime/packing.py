"""Several outputs of a module, or labels, as one tensor, with one row for each sample.

Links, gradient interfaces and sums of gradients know one tensor per module. So a module lays its
outputs one after the other, and the receiver cuts the rows again. Both are exact, and autograd
goes through them. A data set's labels travel in the same way.

Shapes: B batch, N values of one sample's row, H the module's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dni_runtime.spec import NO_LABEL, EdgeSpec, TensorSpec


def row_of(parts: Sequence[TensorSpec]) -> TensorSpec:
    """Return one sample of what travels: a single tensor as it is, several as a row.

    Labels of different types travel as float32, which holds integers up to 2^24.
    """
    if len(parts) == 1:
        return parts[0]
    types = {part.dtype for part in parts}
    dtype = parts[0].dtype if len(types) == 1 else "float32"
    return TensorSpec(shape=(sum(_sizes(parts)),), dtype=dtype)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Lay a batch's outputs one after the other: ``[B, N]``.

    Each output gets its gradient as a tensor of its own, not as a part of the row: kernels may add
    up in another order if the samples do not lie side by side, and ``exact`` would not be exact.
    """
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], 1)


def unpack(row_BN: Tensor, outputs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Return the outputs that :func:`pack` has laid one after the other, each as a new tensor."""
    rows = zip(torch.split(row_BN, _sizes(outputs), 1), outputs, strict=True)
    return tuple(row.contiguous().reshape(len(row), *output.shape) for row, output in rows)


def taken(h_BH: Tensor, outputs: Sequence[TensorSpec], edge: EdgeSpec) -> Tensor:
    """Return what a link carries of a module's output; ``outputs`` is empty if it has one."""
    if not edge.takes:
        return h_BH
    tensors = unpack(h_BH, outputs)
    some = [tensors[index] for index in edge.takes]
    return some[0] if len(some) == 1 else pack(some)


def given_back(g: Tensor, outputs: Sequence[TensorSpec], edge: EdgeSpec) -> Tensor:
    """Return a gradient at a module's whole output; it is 0 at outputs that the link lacks.

    ``g`` is the gradient at what the link carries; ``outputs`` is empty if the module has one.
    """
    if not edge.takes:
        return g
    whole = g.new_zeros(len(g), sum(_sizes(outputs)))
    rows = torch.split(whole, _sizes(outputs), 1)
    carried = [outputs[index] for index in edge.takes]
    gradients = torch.split(g.reshape(len(g), -1), _sizes(carried), 1)
    for index, row in zip(edge.takes, gradients, strict=True):
        rows[index].copy_(row)
    return whole


def no_labels(samples: int) -> Tensor:
    """Return the stand-in for a batch's labels if there are none: ``[B, 0]``."""
    return torch.empty((samples, *NO_LABEL.shape))


def _sizes(outputs: Sequence[TensorSpec]) -> list[int]:
    return [math.prod(output.shape) for output in outputs]
