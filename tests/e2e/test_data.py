"""Real Fashion-MNIST, got as ``make demo`` gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dni_runtime.data import open_data
from dni_runtime.spec import DataSpec
from tests.e2e.conftest import missing, run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.e2e


def test_fashion_mnist() -> None:
    done = run([ROOT / "scripts" / "fetch-fashion-mnist", ROOT / "build" / "fashion-mnist"])
    if done.returncode == 69:
        missing(done.stderr)
    assert done.returncode == 0, done.stderr
    folder = done.stdout.splitlines()[-1]
    spec = DataSpec(dataset="fashion-mnist", path=folder, flatten=True)
    source = open_data(spec, Path(), seed=0)
    assert (source.info.train_samples, source.info.eval_samples) == (60_000, 10_000)
    x = torch.cat([x for x, _ in source.train_batches(0)])
    assert abs(x.mean().item()) < 1e-3
    assert abs(x.std().item() - 1) < 1e-3
