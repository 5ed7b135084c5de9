"""A running mean of scalars that may lie on a device."""

from __future__ import annotations

from torch import Tensor


class Mean:
    """Adds up scalars on their device; only :meth:`take` waits for it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, value: Tensor) -> None:
        """Count one value, without gradient."""
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1

    def take(self) -> float | None:
        """Return the mean of what was added since the last call; None if nothing was."""
        if self._sum is None:
            return None
        mean = float(self._sum) / self._count
        self._sum, self._count = None, 0
        return mean
