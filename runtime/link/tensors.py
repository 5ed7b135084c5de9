"""Tensors as buffers and back, without copies where none is needed.

Bytes travel as they lie in memory: C-contiguous and little-endian (docs/wire.md, "Message").

Shapes: B batch, X a sample's own sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dni_runtime.wire import (
    ITEM_BYTES,
    SCALE_DTYPE,
    Buffer,
    TensorContract,
    TensorEntry,
    nbytes,
    scale_name,
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

_STEPS = 127
_TINY = torch.finfo(torch.float32).tiny


def to_buffers(
    tensor: Tensor, contract: TensorContract
) -> tuple[tuple[TensorEntry, ...], tuple[memoryview, ...]]:
    """A tensor as rows of the tensor table and views of their bytes.

    Narrows it to the contract's type and brings it to the CPU where that is needed; else the bytes
    are the tensor's own, which then MUST NOT change until the message has been acknowledged.

    Args:
        tensor: ``[B, *sample]`` on any device.
        contract: What the link expects.

    Raises:
        WireError: The tensor breaks the contract (a bug of the sender).
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if contract.scale is None:
        entry, buffer = _view(contract.name, contract.dtype, tensor)
        entries, buffers = (entry,), (buffer,)
    else:
        contract.samples(tuple(tensor.shape))
        q_BX, scale_X = quantize(tensor, contract.scale)
        rows = [
            _view(contract.name, contract.dtype, q_BX),
            _view(scale_name(contract.name), SCALE_DTYPE, scale_X),
        ]
        entries, buffers = zip(*rows, strict=True)
    contract.check(entries, buffers)
    return entries, buffers


def from_buffers(entries: Sequence[TensorEntry], buffers: Sequence[Buffer], dtype: str) -> Tensor:
    """A tensor over buffers whose table rows have been checked against its contract.

    The tensor shares the buffer's memory, and keeps it alive, unless it has to be widened to
    ``dtype`` or the buffer is misaligned.

    Args:
        entries: The rows of the table: the tensor's, and that of its scales where it has some.
        buffers: Their bytes, writable.
        dtype: The type to give it as.

    Returns:
        The tensor, on the CPU.
    """
    tensor = _tensor(entries[0], buffers[0])
    if len(entries) > 1:
        tensor = dequantize(tensor, _tensor(entries[1], buffers[1]))
    return tensor.to(DTYPES[dtype])


def quantize(x_BX: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit quantization: integers and their scales, ``x`` being about ``q * scale``.

    The scale is the largest magnitude over 127; integers are rounded to the nearest, ties to even.
    Where there is a NaN or an infinity the scale is NaN, and all that shares it comes back as NaN.

    Plain operations: torch's own quantized tensors are deprecated (pytorch/pytorch#184982), and
    theirs with a scale per channel are several times slower.

    Args:
        x_BX: A tensor of floating-point numbers.
        sizes: Of the scales; they broadcast to a sample's: none for one scale.

    Returns:
        ``int8[B, *X]`` and ``float32[*sizes]``.
    """
    x_BX = x_BX.to(torch.float32)
    if x_BX.numel() == 0:
        return x_BX.to(torch.int8), x_BX.new_zeros(sizes)
    shared = [d for d in range(x_BX.dim()) if d == 0 or not sizes or sizes[d - 1] == 1]
    largest = torch.maximum(x_BX.amax(shared), x_BX.amin(shared).neg_())
    scale = largest.div_(_STEPS).reshape(sizes)
    scale.add_(scale.mul(0))  # an infinity becomes NaN
    scale.clamp_min_(_TINY)  # what has no finite inverse, such as zero, is no scale
    return x_BX.mul(scale.reciprocal()).round_().to(torch.int8), scale


def dequantize(q_BX: Tensor, scale: Tensor) -> Tensor:
    """What :func:`quantize` made, as float32."""
    return q_BX.to(torch.float32).mul_(scale)


def _view(name: str, dtype: str, tensor: Tensor) -> tuple[TensorEntry, memoryview]:
    wanted = DTYPES[dtype]
    if tensor.dtype is not wanted or tensor.device.type != "cpu":
        tensor = tensor.to(device="cpu", dtype=wanted)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    # numpy knows neither bfloat16 nor the difference: plain bytes do
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    return TensorEntry(name, dtype, tuple(tensor.shape)), data


def _tensor(entry: TensorEntry, buffer: Buffer) -> Tensor:
    wire = DTYPES[entry.dtype]
    if nbytes(buffer) == 0:
        return torch.empty(entry.shape, dtype=wire)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    if wire is torch.bool:
        tensor = tensor != 0  # a bool of any other byte than 0 and 1 is undefined
    else:
        if tensor.data_ptr() % wire.itemsize:
            tensor = tensor.clone()
        tensor = tensor.view(wire)
    return tensor.reshape(entry.shape)
