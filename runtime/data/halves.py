"""Samples and labels with different owners: batches of one half, or of two data sets."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from dni_runtime.data.source import Batch, Split
from dni_runtime.packing import no_labels

Half = Literal["samples", "labels"]
"""What is read of a data set whose samples and labels have different owners."""


@dataclass(frozen=True)
class Halves(Split):
    """Samples of one split, and labels of another; one of them may be absent here."""

    # Where they come from; None: there are none, and batches of them are ``[B, 0]``.
    samples: Split | None
    labels: Split | None  # likewise

    @property
    def slow(self) -> bool:  # type: ignore[override]  # of one class elsewhere
        """Whether one of them is slow."""
        return any(one.slow for one in (self.samples, self.labels) if one is not None)

    def __len__(self) -> int:
        one = self.samples or self.labels
        assert one is not None
        return len(one)

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples and labels of these numbers."""
        nothing = no_labels(len(order_B))
        x = nothing if self.samples is None else self.samples.batch(order_B)[0]
        return x, nothing if self.labels is None else self.labels.batch(order_B)[1]

    def in_epoch(self, rng: np.random.Generator) -> Halves:
        """Return both as one epoch uses them, varied by the same random numbers."""
        return Halves(
            *(one and one.in_epoch(copy.deepcopy(rng)) for one in (self.samples, self.labels))
        )

    def held_out(self) -> Halves:
        """Return both as evaluations use those held out for validation."""
        return Halves(*(one and one.held_out() for one in (self.samples, self.labels)))
