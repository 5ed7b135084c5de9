"""Compression of what replicas exchange, and what makes up for its error.

Parameters are sent as their difference from those that both ends have. What compression leaves out
of a difference is added to the next one (error feedback: Seide et al. 2014, Interspeech;
Karimireddy et al. 2019, arXiv:1901.09847). Both directions are compressed, the first replica makes
up for its own error (Tang et al. 2019, arXiv:1905.05957).

Each tensor is compressed by itself, into 32-bit words whose number follows from its sizes.
Decompressing has the same result on every machine: it only copies, multiplies and adds.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.spec import Choice
from dni_runtime.spec.choices import Location, find_class, parse_options
from dni_runtime.spec.named import Frozen

_STEPS = 127
_TINY = torch.finfo(torch.float32).tiny


class Compression(nn.Module):
    """Base class of compressions; this one copies.

    Args:
        options: Its options.
        shapes: Sizes of the tensors in a row.
    """

    class Options(Frozen):
        """The compression's keywords in ``chain.yaml``."""

    def __init__(self, options: Frozen, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.sizes = [math.prod(shape) for shape in shapes]

    @property
    def total(self) -> int:
        """Number of 32-bit words of all tensors."""
        return sum(self.words(place) for place in range(len(self.sizes)))

    def words(self, place: int) -> int:
        """Return the number of 32-bit words of a tensor."""
        return self.sizes[place]

    def compress(self, place: int, x_N: Tensor) -> Tensor:
        """Return a tensor's words, ``int32``.

        Args:
            place: Its place in the row.
            x_N: Its numbers, float32.
        """
        return words_of(x_N)

    def decompress(self, place: int, words: Tensor) -> Tensor:
        """Return a tensor's numbers, ``float32[N]``.

        Raises:
            ValueError: The words cannot be what :meth:`compress` returns.
        """
        return words.view(torch.float32)

    def pack(self, row: Tensor) -> Tensor:
        """Compress all tensors of a row."""
        parts = enumerate(torch.split(row, self.sizes))
        return torch.cat([row[:0].int(), *(self.compress(*part) for part in parts)])

    def unpack(self, words: Tensor) -> Tensor:
        """Return the row that is left of one.

        Raises:
            ValueError: The words cannot be what :meth:`pack` returns.
        """
        counts = [self.words(place) for place in range(len(self.sizes))]
        if len(words) != sum(counts):
            raise ValueError(f"{len(words)} words instead of {sum(counts)}")
        parts = enumerate(torch.split(words, counts))
        return torch.cat([torch.zeros(0), *(self.decompress(*part) for part in parts)])


class Bfloat16(Compression):
    """Half the bits."""

    def words(self, place: int) -> int:
        return -(-self.sizes[place] // 2)

    def compress(self, place: int, x_N: Tensor) -> Tensor:
        return words_of(x_N.to(torch.bfloat16))

    def decompress(self, place: int, words: Tensor) -> Tensor:
        return words.view(torch.bfloat16)[: self.sizes[place]].to(torch.float32)


class Int8(Compression):
    """Integers up to 127, with the largest magnitude of the tensor over 127 as unit."""

    def words(self, place: int) -> int:
        return 1 + -(-self.sizes[place] // 4)

    def compress(self, place: int, x_N: Tensor) -> Tensor:
        scale = (x_N.abs().max() / _STEPS).clamp_min(_TINY) if len(x_N) else x_N.new_ones(())
        scale += scale * 0  # an infinity becomes NaN, and so do all numbers
        return torch.cat([words_of(scale[None]), words_of((x_N / scale).round().to(torch.int8))])

    def decompress(self, place: int, words: Tensor) -> Tensor:
        scale = words[:1].view(torch.float32)
        return words[1:].view(torch.int8)[: self.sizes[place]].to(torch.float32) * scale


class TopK(Compression):
    """The numbers of largest magnitude, a share of each tensor (Aji and Heafield 2017, arXiv:1704.05021)."""  # noqa: E501

    class Options(Frozen):
        """The share that is sent."""

        share: float = Field(default=0.01, gt=0, le=0.5)

    def __init__(self, options: Frozen, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__(options, shapes)
        assert isinstance(options, TopK.Options)
        self._counts = [min(math.ceil(options.share * size), size) for size in self.sizes]

    def words(self, place: int) -> int:
        return 2 * self._counts[place]

    def compress(self, place: int, x_N: Tensor) -> Tensor:
        at_K = x_N.abs().topk(self._counts[place], sorted=False).indices
        return torch.cat([at_K.to(torch.int32), words_of(x_N[at_K])])

    def decompress(self, place: int, words: Tensor) -> Tensor:
        at_K, size = words[: len(words) // 2].to(torch.int64), self.sizes[place]
        if len(at_K) and not 0 <= int(at_K.min()) <= int(at_K.max()) < size:
            raise ValueError(f"the place of a number is not within {size}")
        x_N = torch.zeros(size)
        x_N[at_K] = words[len(at_K) :].view(torch.float32)
        return x_N


class PowerSgd(Compression):
    """Matrices of low rank, P times Q (Vogels et al. 2019, arXiv:1905.13727, algorithm 1).

    One step of power iteration from the Q before. Each sender compresses its own matrix: the sums
    over the workers between the paper's two products would take two more messages. Vectors, and
    matrices that are not larger than P and Q, are sent whole.
    """

    class Options(Frozen):
        """The rank."""

        rank: int = Field(default=2, ge=1)

    def __init__(self, options: Frozen, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__(options, shapes)
        assert isinstance(options, PowerSgd.Options)
        self._rank, self._matrices = options.rank, dict[int, tuple[int, int]]()
        draw = torch.Generator().manual_seed(0)
        for place, shape in enumerate(shapes):
            m = shape[0] if len(shape) > 1 else 0
            n = self.sizes[place] // m if m else 0
            if (m + n) * self._rank < m * n:
                self._matrices[place] = (m, n)
                self.register_buffer(f"q{place}", torch.randn(n, self._rank, generator=draw))

    def words(self, place: int) -> int:
        shape = self._matrices.get(place)
        return self.sizes[place] if shape is None else sum(shape) * self._rank

    def compress(self, place: int, x_N: Tensor) -> Tensor:
        if place not in self._matrices:
            return super().compress(place, x_N)
        x_MN, q_NR = x_N.view(self._matrices[place]), self.get_buffer(f"q{place}")
        p_MR = torch.linalg.qr(x_MN @ q_NR).Q
        found_NR = x_MN.T @ p_MR
        if found_NR.any():  # from zeros the next iteration would find nothing
            q_NR.copy_(found_NR)
        return torch.cat([words_of(p_MR), words_of(found_NR)])

    def decompress(self, place: int, words: Tensor) -> Tensor:
        if place not in self._matrices:
            return super().decompress(place, words)
        m, n = self._matrices[place]
        p_MR, q_NR = torch.split(words.view(torch.float32).view(m + n, self._rank), [m, n])
        x_MN = torch.zeros(m, n)
        for p_M, q_N in zip(p_MR.T, q_NR.T, strict=True):  # a product's rounding would differ
            x_MN += p_M[:, None] * q_N
        return x_MN.flatten()


class Differences(nn.Module):
    """Compressed differences from the row that all had last, with error feedback."""

    base: Tensor  # the parameters that all had last
    error: Tensor  # what compression has left out so far

    def __init__(self, compression: Compression, start: Tensor) -> None:
        super().__init__()
        self.compression = compression
        self.register_buffer("base", start.clone())
        self.register_buffer("error", torch.zeros_like(start))

    @property
    def tag(self) -> int:
        """A checksum of the base: a replica that has another one, for whatever reason, says so."""
        return zlib.crc32(self.base.numpy().data)

    @torch.no_grad()
    def pack(self, row: Tensor, base: Tensor, *, feedback: bool) -> tuple[Tensor, Tensor]:
        """Return the words of a row's difference from a base, and the row that they make.

        With ``feedback``, what is left out is added to the next one.
        """
        target = row - base + self.error
        words = self.compression.pack(target)
        sent = self.compression.unpack(words)
        if feedback:
            self.error = target - sent
        return words, base + sent

    def whole(self, row: Tensor) -> Tensor:
        """Return a row with all that was left out so far."""
        row, self.error = row + self.error, torch.zeros_like(self.error)
        return row


def words_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as 32-bit words, filled up with zeros."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    return torch.cat([data, data.new_zeros(-len(data) % 4)]).view(torch.int32)


COMPRESSIONS: dict[str, type[Compression]] = {
    "bfloat16": Bfloat16,
    "int8": Int8,
    "top-k": TopK,
    "powersgd": PowerSgd,
}

_LOCATION: Location = ("replication", "compression")


def build_compression(choice: Choice, shapes: Sequence[Sequence[int]]) -> Compression:
    cls = find_class(choice.name, "compression", COMPRESSIONS, Compression, _LOCATION)
    made: Compression = cls(parse_options(cls.Options, choice, _LOCATION), shapes)
    return made
