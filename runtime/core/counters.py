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
    """Counters of gradients, and the newest losses."""

    gradients: int = 0  # received from downstream
    unpaired: int = 0  # received, but the batch was no longer stored
    given_up: int = 0  # batches dropped before their gradient came
    skipped: int = 0  # received, but not learnt from: not finite
    lag: int = 0  # sum of the ages of gradients that came, in batches
    lag_max: int = 0  # the largest since this was last set to 0
    loss: Tensor | None = None  # the module's own (tail: the chain's; local head: its)
    error: Mean = field(default_factory=Mean)  # of synthetic gradients (``LateSignal``)
    cosine: Mean = field(default_factory=Mean)  # the same
    head_accuracy: Mean = field(default_factory=Mean)  # of an early head, on training batches
