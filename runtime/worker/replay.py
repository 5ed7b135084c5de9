"""Training again on recent batches, while the module upstream is gone.

The idea is that of asynchronous decoupled greedy learning with a replay buffer (Belilovsky et al.
2020, arXiv:1901.08164): a module that gets nothing new learns from what it has. Nothing is sent on:
downstream has had these batches, and has a buffer of its own.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Self

from torch import Tensor

from dni_runtime.core.step import ModuleStep
from dni_runtime.link import InputLink

SILENT_S = 0.5
"""An input that has been silent for so long may have lost its module."""


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


class Replay:
    """Trains a module again, as long as the module upstream is gone.

    Args:
        step: The module.
        input: Its link from upstream.
        size: How many batches to keep.
    """

    def __init__(self, step: ModuleStep, input: InputLink, size: int) -> None:
        self._step = step
        self._input = input
        self._buffer = ReplayBuffer(size, step.spec.seed)
        self._heard_s = time.monotonic()

    @classmethod
    def of(cls, step: ModuleStep, input: InputLink | None) -> Self | None:
        """As the module's spec wants it; None where it does not, or where that is impossible."""
        size = step.spec.links.replay
        return cls(step, input, size) if size and input is not None and step.replays else None

    @property
    def count(self) -> int:
        """Batches trained on again."""
        return self._buffer.replayed

    def heard(self) -> None:
        """Something has come from upstream."""
        self._heard_s = time.monotonic()

    def keep(self, x_BX: Tensor, y_BY: Tensor) -> None:
        """Keep a batch that the module has just been trained on."""
        self._buffer.keep(x_BX, y_BY)

    def train(self) -> bool:
        """Train on one of the batches, if the module upstream is gone; tells whether it did."""
        if time.monotonic() - self._heard_s < SILENT_S:
            return False
        if self._input.reaches_peer():
            self.heard()  # it is there, and slow
            return False
        chosen = self._buffer.choose()
        if chosen is None:
            return False
        self._step.replay(*chosen)
        return True
