"""What auxiliary classifiers see of an activation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dni_runtime.core.pooling import pooling
from dni_runtime.spec import TensorSpec


def pooled(shape: tuple[int, ...], grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two samples, and what is left of them."""
    layers, features = pooling(TensorSpec(shape=shape, dtype="float32"), grid)
    h_BH = torch.arange(2.0 * torch.Size(shape).numel()).view(2, *shape)
    seen = nn.Sequential(*layers)(h_BH)
    assert seen.shape == (2, features)
    return h_BH, seen


def test_maps_are_averaged_to_a_grid_of_places() -> None:
    h_BCHW, seen = pooled((3, 4, 6), 2)
    assert seen.shape == (2, 3 * 2 * 2)
    torch.testing.assert_close(seen[1, 0], h_BCHW[1, 0, :2, :3].mean())
    torch.testing.assert_close(seen[1, -1], h_BCHW[1, 2, 2:, 3:].mean())


def test_tokens_are_averaged_to_fewer_of_the_same_width() -> None:
    h_BTC, seen = pooled((6, 5), 3)
    assert seen.shape == (2, 3 * 5)
    torch.testing.assert_close(seen[:, 5:10], h_BTC[:, 2:4].mean(1))


@pytest.mark.parametrize("shape", [(7,), (6, 5), (3, 4, 6), (2, 3, 4, 5)])
def test_what_is_small_enough_stays_as_it_is(shape: tuple[int, ...]) -> None:
    h_BH, seen = pooled(shape, 6)
    assert torch.equal(seen, h_BH.flatten(1))
