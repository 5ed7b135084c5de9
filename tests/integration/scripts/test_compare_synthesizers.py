"""scripts/compare_synthesizers.py and the chains that it is for."""

from __future__ import annotations

import sys
from pathlib import Path

import compare_synthesizers
import pytest

from dni_runtime.core.resolve import worker_specs
from dni_runtime.data import describe
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec, load_chain

ROOT = Path(__file__).resolve().parents[3]
CHAINS = sorted((ROOT / "scripts" / "chains").glob("*.yaml"))
PIXELS = TensorSpec(shape=(1, 28, 28), dtype="float32")
LABEL = TensorSpec(shape=(), dtype="int64")


def test_there_are_chains() -> None:
    assert CHAINS


@pytest.mark.parametrize("path", CHAINS, ids=lambda path: path.stem)
def test_each_chain_takes_the_interfaces_that_are_compared(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(path.parent)  # a chain's import paths start there
    chain = load_chain(path)
    info = DataInfo(
        sample=PIXELS, label=LABEL, classes=10, train_samples=60_000, eval_samples=10_000
    )
    if chain.data.dataset == "text":
        info = describe(DataSpec(dataset="text", args=chain.data.args), path.parent)
    for method in ("critic", "local", "mixed", "delayed", "mlp", "none"):
        workers = worker_specs(compare_synthesizers.with_interface(chain, method), info)
        assert workers[-1].output.shape[-1] == info.classes


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chain = ROOT / "definitions" / "chains" / "cnn.yaml"
    monkeypatch.setattr(sys, "argv", ["x", str(chain), "--epochs", "2", "critic", "none"])
    compare_synthesizers.main()
    backprop, critic, none = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (backprop[0], critic[0], none[0]) == ("backprop", "critic", "none")
    assert min(float(critic[1]), float(none[1])) > 50
    shares = critic[critic.index("products") + 1 : critic.index("cosines")]
    assert len(shares) == 2
    assert all(float(share.rstrip("%")) > 0 for share in shares)
    assert len(critic[critic.index("cosines") + 1 :]) == 2
