"""A running mean of scalars."""

import torch

from dni_runtime.core.counters import Mean


def test_a_mean_is_taken_once() -> None:
    mean = Mean()
    assert mean.take() is None
    for value in (1.0, 2.0, 6.0):
        mean.add(torch.tensor(value))
    assert mean.take() == 3
    assert mean.take() is None


def test_what_is_added_is_not_changed() -> None:
    mean, first = Mean(), torch.tensor(1.0)
    mean.add(first)
    mean.add(torch.tensor(2.0))
    assert first == 1
