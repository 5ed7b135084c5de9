"""Training again on recent batches, while the module upstream is gone.

The idea is that of asynchronous decoupled greedy learning with a replay buffer (Belilovsky et al.
2020, arXiv:1901.08164): a module that gets nothing new learns from what it has. Nothing is sent on:
downstream has had these batches, and has a buffer of its own.
"""

from __future__ import annotations

import random
from collections import deque

from torch import Tensor


class ReplayBuffer:
    """Recent training batches, and a random one of them.

    Args:
        size: How many to keep.
        seed: Of the choice; torch's random numbers are left alone.

    Attributes:
        replayed: Batches given out.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=size)
        self._random = random.Random(seed)
        self.replayed = 0

    def keep(self, x_BX: Tensor, y_BY: Tensor) -> None:
        """Keep a batch, in place of the oldest one."""
        self._kept.append((x_BX, y_BY))

    def choose(self) -> tuple[Tensor, Tensor] | None:
        """A random batch; None where there is none."""
        if not self._kept:
            return None
        self.replayed += 1
        return self._random.choice(self._kept)
