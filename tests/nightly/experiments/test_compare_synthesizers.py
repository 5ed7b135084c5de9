"""scripts/experiments/compare_synthesizers.py and the chains that it is for."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import compare_synthesizers
import pytest

from dni_runtime.data import describe
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec, load_chain

ROOT = Path(__file__).resolve().parents[3]
CHAINS = sorted((ROOT / "scripts" / "experiments" / "chains").glob("*.yaml"))
SHAPES = {"npz": (3, 32, 32)}
"""Of samples that are not of 1 x 28 x 28 pixels."""
LABEL = TensorSpec(shape=(), dtype="int64")


def test_there_are_chains() -> None:
    assert CHAINS


@pytest.mark.parametrize("path", CHAINS, ids=lambda path: path.stem)
def test_each_chain_takes_the_interfaces_that_are_compared(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(path.parent)  # a chain's import paths start there
    read = load_chain(path)
    shape = SHAPES.get(read.data.dataset, (784,) if read.data.flatten else (1, 28, 28))
    sample = TensorSpec(shape=shape, dtype="float32")
    info = DataInfo(
        sample=sample, label=LABEL, classes=10, train_samples=60_000, eval_samples=10_000
    )
    if read.data.dataset == "halves:Halves":
        half = TensorSpec(shape=(392,), dtype="float32")
        info = info.model_copy(update={"sample": half, "further": (half,)})
    if read.data.dataset == "text":
        info = describe(DataSpec(dataset="text", args=read.data.args), path.parent)
    for method in ("critic", "local", "mixed", "delayed", "mlp", "none"):
        chain = compare_synthesizers.with_interface(read, method)
        assert worker_specs(chain, info)[-1].output.shape[-1] == info.classes


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chain = ROOT / "definitions" / "chains" / "cnn.yaml"
    monkeypatch.setattr(sys, "argv", ["x", str(chain), "--epochs", "2", "critic", "local"])
    compare_synthesizers.main()
    _, _, *rows = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines())
    assert [row[0].strip() for row in rows] == ["critic", "local"]
    for name, products, cosines in rows:
        shares = [float(share.strip(" %")) for share in products.split(",")]
        assert len(shares) == 2
        assert min(shares) > 0
        found = [float(cosine) for cosine in cosines.split(",")]
        assert all(0 < c < 1 for c in found) if "critic" in name else all(map(math.isnan, found))
