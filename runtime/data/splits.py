"""Splits: the training or evaluation samples of a data set, by their numbers.

Shape suffixes: N samples of a split, B samples of a batch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dni_runtime.errors import DataError
from dni_runtime.packing import no_labels
from dni_runtime.spec import Preprocessing, TensorSpec

Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]
"""Samples (B, …), float32 unless the data set holds integers, and labels (B, …), int64 or float32.

Samples with several inputs are a tuple of tensors. All are new tensors without other references.
Where one half is elsewhere, samples or labels are (B, 0).
"""

Half = Literal["samples", "labels"]
"""What is read of a data set whose samples and labels have different owners."""


class Split(Protocol):
    """The training or the evaluation samples."""

    slow: ClassVar[bool] = False  # loading a batch is so slow that reading ahead pays off
    draws: bool = False  # loading a batch draws from torch's global generator
    drawn: bool = False  # making it has drawn from a global generator
    ordered: ClassVar[bool] = False  # neighbours overlap: parts of it are cut off, not drawn

    def __len__(self) -> int:
        """N, the number of samples."""

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples of these numbers (int64, (B,)), in the order given."""

    def classes(self) -> Tensor | None:
        """Return each sample's class, int64 (N,); None if it has none, or had to be read for it."""
        return None

    def preprocessing(self) -> Preprocessing | None:
        """Return how its samples were made of raw ones; None if that is not known."""
        return None

    def normalized(self, how: Preprocessing) -> Split:
        """Return its samples as made of raw ones in another way, if they are made of such."""
        return self

    def in_epoch(self, rng: np.random.Generator) -> Split:
        """Return the samples as one epoch uses them, possibly varied with ``rng``."""
        return self

    def held_out(self) -> Split:
        """Return the samples as evaluations use those held out for validation."""
        return self


@dataclass(frozen=True)
class MemorySplit(Split):
    """Raw samples in memory, which are normalised batch by batch.

    8-bit images take a quarter of the memory and loading time of float32, and batches take no
    longer (gathering rows is memory-bound).
    """

    x: Tensor  # (N, …): uint8 images, float32, or int64, which is never normalised
    y: Tensor  # (N, …), int64 or float32
    mean: Tensor | None = None  # subtracted from samples in their units; broadcasts over one
    std: Tensor | None = None  # divisor after that

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, order_B: Tensor) -> Batch:
        x = self.x.index_select(0, order_B)
        if self.std is not None:
            x = x.to(torch.float32)
            if self.mean is not None:
                x.sub_(self.mean)
            x.div_(self.std)
        return x, self.y.index_select(0, order_B)

    def classes(self) -> Tensor | None:
        return self.y if self.y.dtype == torch.int64 and self.y.dim() == 1 else None

    def preprocessing(self) -> Preprocessing | None:
        """Return how its samples were made of raw ones."""
        if self.std is None:
            return None
        return Preprocessing(
            raw=sample_of(self.x),
            mean=(0.0,) if self.mean is None else tuple(self.mean.flatten().tolist()),
            std=tuple(self.std.flatten().tolist()),
        )

    def normalized(self, how: Preprocessing) -> Split:
        """Return its samples as made of raw ones in another way."""
        raw, shape, dtype = how.raw, self.x.shape[1:], dtype_name(self.x)
        fits = not how.places or (len(shape), shape[0]) == (len(raw.shape), raw.shape[0])
        if dtype != raw.dtype or not fits:
            raise DataError(
                f"the samples are {dtype}{list(shape)}, and those of the training were "
                f"{raw.dtype}{list(raw.shape)}",
                hint="give it raw samples like those, or samples that are prepared as the network "
                "expects them, with 'normalize: false'",
            )
        mean, std = (torch.tensor(one).reshape(how.places) for one in (how.mean, how.std))
        return replace(self, mean=mean, std=std)


def sample_of(batch: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(batch.shape[1:]), dtype=dtype_name(batch))


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_either(name: str) -> Any:
    """Make the property of :class:`Halves` that holds if it does of a split that is there."""
    return property(lambda halves: any(getattr(half, name) for half in halves._there))


@dataclass(frozen=True)
class Halves(Split):
    """Samples and labels with different owners: of two splits, of which one may be absent here."""

    # Where they come from; None: there are none, and batches of them are ``[B, 0]``.
    samples: Split | None
    labels: Split | None  # likewise

    slow = _of_either("slow")
    draws = _of_either("draws")
    drawn = _of_either("drawn")
    ordered = _of_either("ordered")

    @property
    def _there(self) -> list[Split]:
        return [half for half in (self.samples, self.labels) if half is not None]

    def __len__(self) -> int:
        return len(self._there[0])

    def batch(self, order_B: Tensor) -> Batch:
        nothing = no_labels(len(order_B))
        x = nothing if self.samples is None else self.samples.batch(order_B)[0]
        return x, nothing if self.labels is None else self.labels.batch(order_B)[1]

    def classes(self) -> Tensor | None:
        return self._there[0].classes()

    def preprocessing(self) -> Preprocessing | None:
        """Return how its samples were made of raw ones."""
        return None if self.samples is None else self.samples.preprocessing()

    def normalized(self, how: Preprocessing) -> Halves:
        """Return its samples as made of raw ones in another way."""
        return Halves(self.samples and self.samples.normalized(how), self.labels)

    def in_epoch(self, rng: np.random.Generator) -> Halves:
        """Return both as one epoch uses them, varied by the same random numbers."""
        return Halves(
            *(one and one.in_epoch(copy.deepcopy(rng)) for one in (self.samples, self.labels))
        )

    def held_out(self) -> Halves:
        """Return both as evaluations use those held out for validation."""
        return Halves(*(one and one.held_out() for one in (self.samples, self.labels)))
