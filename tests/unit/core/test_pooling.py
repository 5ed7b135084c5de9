"""What auxiliary classifiers see of an activation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dni_runtime.core.pooling import Grid
from tests.specs import float32


def grid(shape: tuple[int, ...], places: int) -> tuple[Grid, torch.Tensor]:
    """A grid in double precision, and two samples."""
    torch.manual_seed(0)
    made = Grid(float32(*shape), places).double()
    return made, torch.randn(2, *shape, dtype=torch.double)


@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 7, 5), (3, 2, 9)])
def test_maps_are_averaged_as_torch_does_it(shape: tuple[int, ...]) -> None:
    made, h_BCHW = grid(shape, 3)
    size = min(3, shape[1]), min(3, shape[2])
    torch.testing.assert_close(made(h_BCHW), F.adaptive_avg_pool2d(h_BCHW, size).flatten(1))


def test_tokens_are_averaged_to_fewer_of_the_same_width() -> None:
    made, h_BTC = grid((6, 5), 3)
    assert made.features == 3 * 5
    torch.testing.assert_close(made(h_BTC)[:, 5:10], h_BTC[:, 2:4].mean(1))


@pytest.mark.parametrize("shape", [(7,), (6, 5), (3, 4, 6), (2, 3, 4, 5)])
def test_what_is_small_enough_stays_as_it_is(shape: tuple[int, ...]) -> None:
    made, h_BH = grid(shape, 6)
    assert torch.equal(made(h_BH), h_BH.flatten(1))
    assert torch.equal(made.spread(made(h_BH)), h_BH)


@pytest.mark.parametrize("shape", [(7,), (6, 5), (3, 5, 7), (3, 9, 6), (3, 3, 12), (2, 3, 4, 5)])
def test_the_way_back_is_the_gradients(shape: tuple[int, ...]) -> None:
    made, h_BH = grid(shape, 3)
    z_BF = made(h_BH.requires_grad_())
    assert torch.autograd.gradcheck(made, h_BH)
    u_BF = torch.randn_like(z_BF)
    (expected,) = torch.autograd.grad(z_BF, h_BH, u_BF)
    torch.testing.assert_close(made.spread(u_BF), expected)
    torch.testing.assert_close(made.respread(u_BF), made(expected))


@pytest.mark.parametrize(("shape", "free"), [((3, 6, 9), True), ((6, 5), True), ((3, 6, 8), False)])
def test_equal_blocks_cost_no_products(shape: tuple[int, ...], free: bool) -> None:
    made, h_BH = grid(shape, 3)
    with FlopCounterMode(display=False) as counted:
        z_BF = made(h_BH.requires_grad_())
        z_BF.backward(made.respread(z_BF.detach()))
    assert (counted.get_total_flops() == 0) is free
