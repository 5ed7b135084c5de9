"""Counters and means of a module's step, reported in the worker's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


class Mean:
    """Adds up scalars on their device, without waiting for it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, value: Tensor) -> None:
        """Count one value, without gradient."""
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1

    def take(self) -> Tensor | None:
        """Return the mean of what was added since the last call; None if nothing was."""
        if self._sum is None:
            return None
        mean = self._sum.double() / self._count
        self._sum, self._count = None, 0
        return mean


@dataclass
class StepCounters:
    """Counters of gradients, and the newest losses.

    Attributes:
        gradients: Gradients received from downstream.
        unpaired: Gradients received whose batch was no longer stored.
        given_up: Batches whose gradient did not come before the store was full.
        skipped: Gradients received but not learnt from, because they were not finite.
        lag: Sum of the ages of gradients that came, in batches.
        lag_max: The largest of these ages since this was last set to 0.
        loss: The module's own loss (tail: the chain's; local head: its), newest.
        error: Error of synthetic gradients, when measured (``LateSignal``).
        cosine: Their cosine, when measured.
        head_accuracy: Accuracy of an early head on training batches, when measured.
    """

    gradients: int = 0
    unpaired: int = 0
    given_up: int = 0
    skipped: int = 0
    lag: int = 0
    lag_max: int = 0
    loss: Tensor | None = None
    error: Mean = field(default_factory=Mean)
    cosine: Mean = field(default_factory=Mean)
    head_accuracy: Mean = field(default_factory=Mean)

    def count_lag(self, batches: int) -> None:
        """Count the age of a gradient that has come."""
        self.lag += batches
        self.lag_max = max(self.lag_max, batches)
