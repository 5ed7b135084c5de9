"""What a link lets through: sizes that any message may have, and one tensor's contract."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dni_runtime.errors import WireError
from dni_runtime.wire.message import TensorEntry

HEADER_BYTES = 1 << 16
"""The largest header."""

ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element of each dtype that can travel (torch's names)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes beyond which a message is refused unread.

    Attributes:
        tensors: Tensors in one message.
        buffer_bytes: Bytes in one tensor's buffer.
        header_bytes: Bytes in the header.
    """

    tensors: int
    buffer_bytes: int
    header_bytes: int = HEADER_BYTES


@dataclass(frozen=True, slots=True)
class TensorContract:
    """What one tensor of a link looks like.

    Attributes:
        name: Its name in the tensor table.
        dtype: torch's name of its type on the wire.
        shape: Sizes of one sample, without the batch dimension.
        batch_limit: Samples in the largest batch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch_limit: int

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{' x '.join(['B', *map(str, self.shape)])}]"

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest batch."""
        return self.batch_limit * self.sample_bytes

    def check(self, entry: TensorEntry, nbytes: int) -> int:
        """Compare a tensor with the contract, before its bytes are viewed.

        Args:
            entry: The tensor's row of the table.
            nbytes: Bytes in its buffer.

        Returns:
            The number of samples.

        Raises:
            WireError: It differs; reasons ``count``, ``dtype``, ``shape``, ``truncated`` and
                ``oversized``.
        """
        if entry.name != self.name:
            raise WireError("count", f"tensor {entry.name!r} where {self.name!r} is due")
        if entry.dtype != self.dtype:
            raise WireError("dtype", f"{self} comes as {entry.dtype!r}")
        shape = entry.shape
        if not shape or shape[1:] != self.shape or not 1 <= shape[0] <= self.batch_limit:
            raise WireError(
                "shape", f"{self}, B from 1 to {self.batch_limit}, comes with sizes {shape}"
            )
        due = shape[0] * self.sample_bytes
        if nbytes != due:
            raise WireError(
                "truncated" if nbytes < due else "oversized",
                f"{self} with B = {shape[0]} has {due} bytes, not {nbytes}",
            )
        return shape[0]
