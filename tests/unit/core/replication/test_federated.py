"""Federated averaging takes a share of the replicas."""

from __future__ import annotations

import torch

from dni_runtime.core.replication import Sync
from dni_runtime.core.step import ModuleStep
from tests.replicas import learn, replicas, share, shared

STRATEGY = "{federated: {share: 0.5}}"


def drawn(id: int) -> set[int]:
    steps = [ModuleStep(spec) for spec in replicas(STRATEGY, 4)]
    offers = [shared(step).offer(Sync(id, full=False)) for step in steps]
    return {number for number, offer in enumerate(offers) if offer.row is not None}


def test_all_take_the_mean_of_those_drawn_by_samples() -> None:
    steps = [ModuleStep(spec) for spec in replicas(STRATEGY, 4)]
    for id, step in enumerate(steps, start=1):
        learn(step, id, torch.randn(4 * id, 8), torch.randn(4 * id, 6))
    rows, chosen = [shared(step).row() for step in steps], drawn(9)
    share(steps, 9)
    samples = {number: 4 * (number + 1) for number in chosen}
    mean = sum(rows[one] * count for one, count in samples.items()) / sum(samples.values())
    for step in steps:
        assert torch.allclose(shared(step).row(), mean, atol=1e-6)


def test_the_draw_follows_from_the_point() -> None:
    """So a restart repeats it; in time all take part."""
    draws = [drawn(id) for id in range(1, 21)]
    assert all(len(one) == 2 for one in draws)
    assert draws == [drawn(id) for id in range(1, 21)]
    assert set.union(*draws) == {0, 1, 2, 3}
    assert len({frozenset(one) for one in draws}) > 3
