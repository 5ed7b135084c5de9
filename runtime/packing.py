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

from dni_runtime.errors import SpecError
from dni_runtime.spec import NO_LABEL, EdgeSpec, TensorSpec


def row_of(parts: Sequence[TensorSpec]) -> TensorSpec:
    """Return one sample of what travels: a single tensor as it is, several as a row.

    Labels of different types travel as float32, which holds integers up to 2^24. Parts of a length
    that varies must have the same, once: the row's own length then tells it.
    """
    if len(parts) == 1:
        return parts[0]
    varying = [part for part in parts if part.varying]
    lengths = {tuple(part.shape[at] for at in part.varying) for part in varying}
    if len(lengths) > 1 or any(len(one) > 1 for one in lengths):
        raise SpecError(
            f"{' and '.join(map(str, varying))} cannot travel in one row: their lengths differ",
            location=("data", "max_length"),
            hint="pad to one length, without 'data.max_length'",
        )
    types = {part.dtype for part in parts}
    dtype = parts[0].dtype if len(types) == 1 else "float32"
    return TensorSpec(shape=(sum(_sizes(parts)),), dtype=dtype, varying=(0,) if varying else ())


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
    sizes = _sizes(outputs, _share(row_BN, outputs) or _WHOLE)
    rows = zip(torch.split(row_BN, sizes, 1), outputs, strict=True)
    return tuple(
        row.contiguous().reshape(
            len(row), *(-1 if at in output.varying else n for at, n in enumerate(output.shape))
        )
        for row, output in rows
    )


def taken(h_BH: Tensor, outputs: Sequence[TensorSpec], edge: EdgeSpec) -> Tensor:
    """Return what a link carries of a module's output; ``outputs`` is empty if it has one."""
    if not edge.takes:
        return h_BH
    tensors = unpack(h_BH, outputs)
    some = [tensors[index] for index in edge.takes]
    return some[0] if len(some) == 1 else pack(some)


def given_back(
    gradients: Sequence[tuple[Tensor, Sequence[int]]], outputs: Sequence[TensorSpec]
) -> list[Tensor]:
    """Return gradients at a module's whole output, each 0 at outputs that its link lacks.

    Each is given at what a link carries, with the numbers of those outputs; none: of all.
    ``outputs`` is empty if the module has one.
    """
    if not any(takes for _, takes in gradients):
        return [g for g, _ in gradients]
    rows = [(g.reshape(len(g), -1), takes or range(len(outputs))) for g, takes in gradients]
    shares = (_share(row, [outputs[at] for at in takes]) for row, takes in rows)
    share = next(filter(None, shares), _WHOLE)
    sizes, returned = _sizes(outputs, share), list[Tensor]()
    for row, takes in rows:
        if len(takes) == len(outputs):
            returned.append(row)
            continue
        parts = torch.split(whole := row.new_zeros(len(row), sum(sizes)), sizes, 1)
        for at, part in zip(takes, torch.split(row, [sizes[at] for at in takes], 1), strict=True):
            parts[at].copy_(part)
        returned.append(whole)
    return returned


def no_labels(samples: int) -> Tensor:
    """Return the stand-in for a batch's labels if there are none: ``[B, 0]``."""
    return torch.empty((samples, *NO_LABEL.shape))


_WHOLE = (1, 1)


def _share(row_BN: Tensor, parts: Sequence[TensorSpec]) -> tuple[int, int] | None:
    """Return the length in a row of these parts, and the largest; None if it does not tell it."""
    most = sum(math.prod(part.shape) for part in parts if part.varying)
    fixed = sum(math.prod(part.shape) for part in parts if not part.varying)
    return (row_BN.shape[1] - fixed, most) if most else None


def _sizes(outputs: Sequence[TensorSpec], share: tuple[int, int] = _WHOLE) -> list[int]:
    """Return how many numbers each output has; those of a length that varies, a share of them."""
    sizes = ((output, math.prod(output.shape)) for output in outputs)
    return [size * share[0] // share[1] if output.varying else size for output, size in sizes]
