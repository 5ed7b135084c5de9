"""Random numbers that depend on the chain's seed and a place in the data alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derived_seed(*numbers: int) -> int:
    """A seed of 63 bits from numbers of at least 0."""
    (seed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(seed) >> 1


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed torch's global generator within, and put it back afterwards; GPUs' are not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(*numbers))
        yield
