"""DiLoCo's outer optimizer."""

from __future__ import annotations

import torch
from torch import nn

from dni_runtime.core.replication.strategies import DiLoCo


def test_diloco_is_sgd_with_nesterov_momentum_on_the_distance() -> None:
    start = torch.randn(6)
    ours = DiLoCo(DiLoCo.Options(lr=0.5, momentum=0.8), start)
    theirs = nn.Parameter(start.clone())
    outer = torch.optim.SGD([theirs], lr=0.5, momentum=0.8, nesterov=True)
    for seed in range(4):
        mean = theirs.detach() + torch.randn(6, generator=torch.Generator().manual_seed(seed))
        theirs.grad = theirs.detach() - mean
        outer.step()
        assert torch.allclose(ours.agree(mean), theirs.detach(), atol=1e-6)


def test_diloco_without_momentum_at_rate_1_is_local_sgd() -> None:
    start, mean = torch.randn(6), torch.randn(6)
    ours = DiLoCo(DiLoCo.Options(lr=1.0, momentum=0.0), start).agree(mean)
    assert torch.allclose(ours, mean, atol=1e-6)
