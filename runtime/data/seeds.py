"""Random numbers that depend only on the chain's seed and a position in the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derived_seed(*numbers: int) -> int:
    """Return a seed of 63 bits from numbers of at least 0."""
    (seed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(seed) >> 1


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the context, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(*numbers))
        yield
