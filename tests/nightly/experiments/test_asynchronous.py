"""Asynchronous pipelines of one stage, which talks to nobody; several: ``tests/integration``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peers.asynchronous import AsynchronousPipeline
from peers.build import cross_entropy
from torch import nn

BATCH = 8


def stage(**settings: int) -> AsynchronousPipeline:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return AsynchronousPipeline(module, sgd, 0, [(3,)], BATCH, **settings)


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_two_versions_of_the_weights_and_one_of_the_running_figures() -> None:
    random = torch.Generator().manual_seed(1)
    found = stage(micro_batches=2, versions=2, in_flight=1)
    plain = stage(micro_batches=1, versions=1, in_flight=1).module
    older = [p.detach().clone() for p in plain.parameters()]
    for _ in range(4):
        x_BX = torch.randn(BATCH, 4, generator=random)
        y_BY = torch.randint(3, (BATCH,), generator=random)
        found.step(x_BX, y_BY)
        # W(t + 1) = W(t) - lr * gradient at W(t - 1), of both micro-batches
        newest = [p.detach().clone() for p in plain.parameters()]
        with torch.no_grad():
            for p, old in zip(plain.parameters(), older, strict=True):
                p.copy_(old)
        plain.zero_grad()
        for x_MX, y_MY in zip(x_BX.chunk(2), y_BY.chunk(2), strict=True):
            (cross_entropy(plain(x_MX), y_MY) / 2).backward()
        with torch.no_grad():
            for p, new in zip(plain.parameters(), newest, strict=True):
                p.copy_(new - 0.1 * p.grad)
        older = newest
    for name, value in found.module.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)


def test_a_copy_may_not_change_while_it_is_used() -> None:
    with pytest.raises(ValueError, match="more than 2 copies"):
        stage(micro_batches=2, versions=2, in_flight=4)
    with pytest.raises(ValueError, match="no 3 equal parts"):
        stage(micro_batches=3, versions=2, in_flight=1)
