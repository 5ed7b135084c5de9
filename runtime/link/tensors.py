"""Tensors as buffers and back, without copies where none is needed.

Bytes travel as they lie in memory: C-contiguous and little-endian (docs/wire.md, "Message").
"""

from __future__ import annotations

import torch
from torch import Tensor

from dni_runtime.wire import ITEM_BYTES, Buffer, TensorContract, TensorEntry, nbytes

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


def to_buffer(tensor: Tensor, contract: TensorContract) -> tuple[TensorEntry, memoryview]:
    """A tensor as a row of the tensor table and a view of its bytes.

    Narrows it to the contract's type and brings it to the CPU where that is needed; else the bytes
    are the tensor's own, which then MUST NOT change until the message has been acknowledged.

    Args:
        tensor: ``[B, *sample]`` on any device.
        contract: What the link expects.

    Raises:
        WireError: The tensor breaks the contract (a bug of the sender).
    """
    dtype = DTYPES[contract.dtype]
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is not dtype or tensor.device.type != "cpu":
        tensor = tensor.to(device="cpu", dtype=dtype)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    entry = TensorEntry(contract.name, contract.dtype, tuple(tensor.shape))
    contract.check(entry, tensor.nbytes)
    # numpy knows neither bfloat16 nor the difference: plain bytes do
    return entry, tensor.reshape(-1).view(torch.uint8).numpy().data


def from_buffer(entry: TensorEntry, buffer: Buffer, dtype: str) -> Tensor:
    """A tensor over a buffer whose table row has been checked against its contract.

    The tensor shares the buffer's memory, and keeps it alive, unless it has to be widened to
    ``dtype`` or the buffer is misaligned.

    Args:
        entry: The tensor's row of the table.
        buffer: Its bytes, writable.
        dtype: The type to give it as.

    Returns:
        The tensor, on the CPU.
    """
    wire = DTYPES[entry.dtype]
    if nbytes(buffer) == 0:
        return torch.empty(entry.shape, dtype=DTYPES[dtype])
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    if wire is torch.bool:
        tensor = tensor != 0  # a bool of any other byte than 0 and 1 is undefined
    else:
        if tensor.data_ptr() % wire.itemsize:
            tensor = tensor.clone()
        tensor = tensor.view(wire)
    return tensor.reshape(entry.shape).to(DTYPES[dtype])
