"""Synthetic inputs follow the true ones."""

from __future__ import annotations

import pytest
import torch

from dni_runtime.worker.idle import InputModel
from tests.specs import float32, int64

SHAPES = {"vector": (6,), "maps": (2, 3, 3), "tokens": (5, 4)}


@pytest.mark.parametrize(
    ("kind", "per_token"), [*((kind, False) for kind in SHAPES), ("tokens", True)]
)
def test_means_and_variances_of_each_class(kind: str, per_token: bool) -> None:
    shape = SHAPES[kind]
    label = int64(*shape[:1] if per_token else ())
    model = InputModel(float32(*shape), label, 3)
    torch.manual_seed(0)
    features = shape[-1:] if per_token else shape
    mean, std = torch.randn(3, *features), torch.rand(3, *features) + 0.2
    for _ in range(150):
        y = torch.randint(0, 3, (64, *label.shape))
        x = (mean[y] + std[y] * torch.randn(64, *shape)).reshape(64, *shape)
        model.learn(x, y)
    y = torch.arange(3).repeat_interleave(600)
    if per_token:
        y = y.unsqueeze(1).expand(-1, shape[0])
    x = torch.empty(len(y), *shape)
    drawn = model.draw(x, y, torch.Generator().manual_seed(0))
    assert drawn.shape == x.shape
    for one in range(3):
        mine = drawn[one * 600 : (one + 1) * 600]
        if per_token:
            mine = mine.flatten(0, 1)
        torch.testing.assert_close(mine.mean(0), mean[one], atol=0.35, rtol=0)
        torch.testing.assert_close(mine.std(0), std[one], atol=0.35, rtol=0)


def test_labels_that_are_numbers_have_one_mean() -> None:
    model = InputModel(float32(4), float32(2), None)
    model.learn(torch.full((8, 4), 2.0), torch.randn(8, 2))
    drawn = model.draw(torch.empty(3, 4), torch.randn(3, 2), torch.Generator())
    assert torch.equal(drawn, torch.full((3, 4), 2.0))
