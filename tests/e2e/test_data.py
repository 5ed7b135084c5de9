"""Real Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dni_runtime.data import open_data
from dni_runtime.spec import DataSpec

pytestmark = pytest.mark.e2e


def test_fashion_mnist(fashion_mnist: Path) -> None:
    spec = DataSpec(dataset="fashion-mnist", path=str(fashion_mnist), flatten=True)
    source = open_data(spec, Path(), seed=0)
    assert (source.info.train_samples, source.info.eval_samples) == (60_000, 10_000)
    x = torch.cat([x for x, _ in source.train_batches(0)])
    assert abs(x.mean().item()) < 1e-3
    assert abs(x.std().item() - 1) < 1e-3
