"""What replicas send each other, as 32-bit words (docs/wire.md, "Replicas")."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from dni_runtime.core.replication.compression import Compression, words_of
from dni_runtime.errors import WireError

_HEADER = struct.Struct("<IId")
HEADER_WORDS = _HEADER.size // 4
ROW, PACKED, ASKS, WAITS = 1, 2, 4, 8


@dataclass(frozen=True)
class Message:
    """What a replica offers, or the answer."""

    row: Tensor | None = None  # float32
    weight: float = 0.0  # in the mean
    # The row's words, if compressed; its parameters are differences then.
    packed: Tensor | None = None
    tag: int = 0  # checksum of the base that the replica has; 0 without compression
    asks: bool = False  # that all offer their rows at the next point
    waits: bool = False  # for the answer, though the strategy does not

    def words(self) -> Tensor:
        """Return its words, ``int32``."""
        flags = ASKS * self.asks | WAITS * self.waits
        flags |= ROW * (self.row is not None) | PACKED * (self.packed is not None)
        header = bytearray(_HEADER.pack(flags, self.tag, self.weight))
        parts = [torch.frombuffer(header, dtype=torch.int32)]
        if self.packed is not None:
            parts.append(self.packed)
        elif self.row is not None:
            parts.append(words_of(self.row))
        return torch.cat(parts)

    @classmethod
    def read(cls, words: Tensor, size: int, compression: Compression | None) -> Message:
        """Return the message of some words; raises ``WireError`` if there is none in them."""
        if len(words) < HEADER_WORDS:
            raise WireError("body", f"a message of {len(words)} words")
        header = words[:HEADER_WORDS].contiguous().view(torch.uint8).numpy().tobytes()
        flags, tag, weight = _HEADER.unpack(header)
        payload, row, packed = words[HEADER_WORDS:], None, None
        if not (math.isfinite(weight) and weight >= 0):
            raise WireError("body", f"a row has the weight {weight}")
        if flags & ~(ROW | PACKED | ASKS | WAITS) or (flags & PACKED and not flags & ROW):
            raise WireError("body", f"a message has the flags {flags}")
        if flags & PACKED:
            if compression is None:
                raise WireError("body", "a compressed row, but rows are not compressed here")
            count, rest = compression.total, size - sum(compression.sizes)
            if len(payload) != count + rest:
                raise WireError("body", f"{len(payload)} words instead of {count + rest}")
            try:
                row_P, packed = compression.unpack(payload[:count]), payload
                row = torch.cat([row_P, payload[count:].view(torch.float32)])
            except ValueError as error:
                raise WireError("body", f"a compressed row: {error}") from None
        elif flags & ROW:
            row = payload.view(torch.float32)
        if len(payload) != (0 if row is None else size) and packed is None:
            raise WireError("body", f"{len(payload)} words in a row of {size}")
        return cls(row, weight, packed, tag, bool(flags & ASKS), bool(flags & WAITS))
