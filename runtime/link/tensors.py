"""Tensors as buffers and back, with as few copies as possible.

Bytes are sent as they lie in memory: C-contiguous and little-endian (docs/wire.md, "Message").

Shapes: B batch, X a sample's own sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dni_runtime.errors import WireError
from dni_runtime.wire import (
    ITEM_BYTES,
    SCALE_DTYPE,
    Buffer,
    TensorContract,
    TensorEntry,
    scale_name,
)

# numpy has no bfloat16, and a byte of the wire need not be a valid bool
_NUMPY = {
    name: np.dtype({"bfloat16": "int16", "bool": "uint8"}.get(name, name)) for name in ITEM_BYTES
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

_STEPS = 127
_TINY = torch.finfo(torch.float32).tiny


def to_buffers(
    tensor: Tensor, contract: TensorContract
) -> tuple[tuple[TensorEntry, ...], tuple[memoryview, ...]]:
    """Return a tensor ``[B, *sample]`` as rows of the tensor table and views of their bytes.

    Converts it to the contract's type and moves it to the CPU if necessary; else the bytes are the
    tensor's own, which then MUST NOT change until the message has been acknowledged.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    contract.samples(tuple(tensor.shape))
    if contract.scale is None:
        entry, buffer = _view(contract.name, contract.dtype, tensor)
        return (entry,), (buffer,)
    q_BX, scale_X = quantize(tensor, contract.scale)
    entry, buffer = _view(contract.name, contract.dtype, q_BX)
    scales = _view(scale_name(contract.name), SCALE_DTYPE, scale_X)
    return (entry, scales[0]), (buffer, scales[1])


def to_table(
    tensors: Sequence[Tensor], contracts: Sequence[TensorContract]
) -> tuple[tuple[TensorEntry, ...], tuple[memoryview, ...]]:
    """Return a BATCH's tensors, the labels last, as its table and bytes; see :func:`to_buffers`."""
    samples = tensors[-1].shape[0]
    entries: tuple[TensorEntry, ...] = ()
    buffers: tuple[memoryview, ...] = ()
    for tensor, contract in zip(tensors, contracts, strict=True):
        if tensor.shape[:1] != (samples,):
            raise WireError("shape", f"{len(tensor)} samples in {contract.name} but {samples} in y")
        more = to_buffers(tensor, contract)
        entries, buffers = entries + more[0], buffers + more[1]
    return entries, buffers


def from_buffers(entries: Sequence[TensorEntry], buffers: Sequence[Buffer], dtype: str) -> Tensor:
    """Return a tensor on the CPU over buffers whose rows have been checked against its contract.

    The tensor shares the memory of its buffer, which MUST be writable, and keeps it alive, unless
    it must be converted to ``dtype`` or the buffer is misaligned. A second row and buffer are those
    of its scales.
    """
    tensor = _tensor(entries[0], buffers[0])
    if len(entries) > 1:
        tensor = dequantize(tensor, _tensor(entries[1], buffers[1]))
    target = DTYPES[dtype]
    return tensor if tensor.dtype is target else tensor.to(target)


def quantize(x_BX: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit quantization: ``int8[B, *X]`` and ``float32[*sizes]``; x is about q * scale.

    The scale is the largest magnitude over 127; integers are rounded to the nearest, ties to even.
    A NaN or an infinity makes the scale NaN, and with it all values that share the scale. ``sizes``
    broadcast to a sample's; empty: one scale.

    Uses plain operations: torch's quantized tensors are deprecated (pytorch/pytorch#184982), and
    those with a scale per channel are several times slower.
    """
    x_BX = x_BX.to(torch.float32)
    if x_BX.numel() == 0:
        return x_BX.to(torch.int8), x_BX.new_zeros(sizes)
    shared = [d for d in range(x_BX.dim()) if d == 0 or not sizes or sizes[d - 1] == 1]
    largest = torch.maximum(x_BX.amax(shared), x_BX.amin(shared).neg_())
    scale = largest.div_(_STEPS).reshape(sizes)
    scale.add_(scale.mul(0))  # an infinity becomes NaN
    scale.clamp_min_(_TINY)  # a scale needs a finite inverse: not zero, for example
    return x_BX.mul(scale.reciprocal()).round_().to(torch.int8), scale


def dequantize(q_BX: Tensor, scale: Tensor) -> Tensor:
    """Return the result of :func:`quantize` as float32."""
    return q_BX.to(torch.float32).mul_(scale)


def _view(name: str, dtype: str, tensor: Tensor) -> tuple[TensorEntry, memoryview]:
    target = DTYPES[dtype]
    if tensor.dtype is not target or not tensor.is_cpu:
        tensor = tensor.to(device="cpu", dtype=target)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    shape = tuple(tensor.shape)
    if target is torch.bfloat16:  # numpy does not know it
        tensor = tensor.view(torch.int16)
    return TensorEntry(name, dtype, shape), tensor.numpy().data


def _tensor(entry: TensorEntry, buffer: Buffer) -> Tensor:
    # through numpy: torch.frombuffer and a view take twice as long
    array = np.ndarray(entry.shape, _NUMPY[entry.dtype], buffer)
    if not array.flags.aligned:
        array = array.copy()
    tensor = torch.from_numpy(array)
    if entry.dtype == "bool":
        return tensor != 0  # a bool of a byte other than 0 and 1 is undefined
    return tensor.view(torch.bfloat16) if entry.dtype == "bfloat16" else tensor
