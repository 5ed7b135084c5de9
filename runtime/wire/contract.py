"""Limits that every message of a link must keep, and one tensor's contract."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dni_runtime.errors import WireError
from dni_runtime.wire.message import Buffer, TensorEntry, nbytes

HEADER_BYTES = 1 << 16
"""Maximum size of a header."""

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
"""Bytes of one element of each dtype that can be sent (torch's names)."""

SCALE_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes above which a message is refused unread."""

    tensors: int  # number in one message
    buffer_bytes: int  # of one tensor
    header_bytes: int = HEADER_BYTES


@dataclass(frozen=True)
class TensorContract:
    """Type and sizes of one tensor of a link."""

    name: str  # in the tensor table
    dtype: str  # on the wire (torch's name)
    shape: tuple[int, ...]  # of one sample, without the batch dimension
    batch_limit: int  # samples in the largest batch
    # if quantized: sizes of its scales, which broadcast to a sample's
    scale: tuple[int, ...] | None = None
    varying: tuple[int, ...] = ()  # dimensions of which ``shape`` has the largest size

    def __str__(self) -> str:
        sizes = (f"<={n}" if at in self.varying else str(n) for at, n in enumerate(self.shape))
        return f"{self.name}: {self.dtype}[{' x '.join(['B', *sizes])}]"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its rows in the tensor table."""
        return (self.name,) if self.scale is None else (self.name, scale_name(self.name))

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of one sample, the largest if they differ."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest batch."""
        scales = 0 if self.scale is None else math.prod(self.scale) * ITEM_BYTES[SCALE_DTYPE]
        return max(self.batch_limit * self.sample_bytes, scales)

    def check(self, entries: Sequence[TensorEntry], buffers: Sequence[Buffer]) -> int:
        """Compare a tensor, and its scales, with the contract; return the number of samples.

        MUST come before its bytes are viewed. Raises ``WireError`` with the reasons ``count``,
        ``dtype``, ``shape``, ``truncated``, ``oversized`` and ``scale``.
        """
        names = tuple([entry.name for entry in entries])
        if names != self.names:
            raise WireError("count", f"tensors {names} instead of {self.names}")
        entry, size = entries[0], nbytes(buffers[0])
        if entry.dtype != self.dtype:
            raise WireError("dtype", f"{self} comes as {entry.dtype!r}")
        samples = self.samples(entry.shape)
        due = math.prod(entry.shape) * ITEM_BYTES[self.dtype]
        if size != due:
            raise WireError(
                "truncated" if size < due else "oversized",
                f"{self} with B = {samples} has {due} bytes, not {size}",
            )
        if self.scale is not None:
            self._check_scale(entries[1], buffers[1])
        return samples

    def samples(self, shape: tuple[int, ...]) -> int:
        """Return the number of samples in a tensor of these sizes, once they fit the contract."""
        own = shape[1:]
        fits = own == self.shape or (self.varying and holds(self.shape, self.varying, own))
        if not shape or not fits or not 1 <= shape[0] <= self.batch_limit:
            raise WireError(
                "shape", f"{self}, B from 1 to {self.batch_limit}, comes with sizes {shape}"
            )
        return shape[0]

    def _check_scale(self, entry: TensorEntry, buffer: Buffer) -> None:
        if entry.dtype != SCALE_DTYPE:
            raise WireError("dtype", f"the scales of {self} come as {entry.dtype!r}")
        assert self.scale is not None
        if entry.shape != self.scale:
            raise WireError(
                "shape", f"the scales of {self} have the sizes {self.scale}, not {entry.shape}"
            )
        due = math.prod(self.scale) * ITEM_BYTES[SCALE_DTYPE]
        if nbytes(buffer) != due:
            raise WireError(
                "truncated" if nbytes(buffer) < due else "oversized",
                f"the scales of {self} have {due} bytes, not {nbytes(buffer)}",
            )
        values = np.frombuffer(buffer, "<f4")
        if (values < 0).any() or np.isposinf(values).any():  # NaN may come: see docs/wire.md
            raise WireError("scale", f"{self} has a scale that is negative or infinite")


def holds(largest: Sequence[int], varying: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a sample has the largest sizes, or in the dimensions that vary smaller ones."""
    return len(sizes) == len(largest) and all(
        size == most or (at in varying and 1 <= size < most)
        for at, (size, most) in enumerate(zip(sizes, largest, strict=True))
    )


def scale_name(name: str) -> str:
    """Return the name of the row for a tensor's scales."""
    return f"{name}_scale"
