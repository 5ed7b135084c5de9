"""A figure that was measured several times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Spread:
    """Median and range of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the quotients of values from the same repetition.

    A machine's speed changes from minute to minute: the median of such quotients is more reliable
    than the quotient of the medians.
    """
    return [a / b for a, b in zip(values, base, strict=True)]
