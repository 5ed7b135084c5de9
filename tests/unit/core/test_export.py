"""Taking a chain home: the whole network from its modules' checkpoints."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file
from torch import Tensor, nn

from dni_runtime import load
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.export import export_model
from dni_runtime.core.resolve import worker_specs
from dni_runtime.errors import UnavailableError
from dni_runtime.spec import DataInfo, TensorSpec, parse_chain
from dni_runtime.worker.checkpoint import snapshot


class Tied(nn.Module):
    """A word's vector on the way in is its map on the way out; part of it is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("first", self.words.weight.detach()[:2])

    def forward(self, x: Tensor) -> Tensor:
        p: Tensor = self.out(self.words(x))
        return p


AVERAGED = """\
name: averaged
defaults: {ema: 0.5, interface: exact, optimizer: {SGD: {lr: 0.5}}}
modules:
  - name: a
    layers: [{Linear: {in_features: 4, out_features: 6}}, {BatchNorm1d: {num_features: 6}}]
  - {name: fixed, layers: [{Linear: {in_features: 6, out_features: 6}}], freeze: true}
  - {name: bare, layers: [ReLU]}
  - {name: b, layers: [{Linear: {in_features: 6, out_features: 5}}]}
"""
CHAIN = f"""\
name: tied
modules:
  - {{name: a, layers: [{{import: '{__name__}:Tied'}}], interface: exact}}
  - {{name: b, layers: [{{Linear: {{in_features: 5, out_features: 5}}}}]}}
"""
INFO = DataInfo(
    sample=TensorSpec(shape=(4,), dtype="int64"),
    label=TensorSpec(shape=(4,), dtype="int64"),
    classes=5,
)


def saved(chain: LocalChain, folder: Path) -> dict[str, Path]:
    """A checkpoint of each module."""
    states = {}
    for step in chain.steps:
        states[step.spec.module] = folder / f"{step.spec.module}.safetensors"
        save_file(snapshot(step)[0], states[step.spec.module])
    return states


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_averages_of_weights_are_exported(tmp_path: Path, ending: str) -> None:
    """Of modules that keep one: what trains nothing has none, whatever the defaults say."""
    info = DataInfo(
        sample=TensorSpec(shape=(4,), dtype="float32"),
        label=TensorSpec(shape=(), dtype="int64"),
        classes=5,
    )
    workers = worker_specs(parse_chain(AVERAGED), info)
    chain = LocalChain(workers)
    seen: list[dict[str, Tensor]] = []
    for x in torch.randn(3, 8, 4):
        chain.train_batch(x, x.argmax(1))
        seen.append({k: v.clone() for k, v in chain.steps[0].layers.state_dict().items()})
    output = tmp_path / f"net.{ending}"
    export_model(workers, saved(chain, tmp_path), output)
    model = load(output)
    x = torch.randn(8, 4)
    torch.testing.assert_close(model(x), chain.predict(x))
    if ending == "safetensors":
        first, second, third = (one["0.weight"] for one in seen)
        a = model.get_submodule("a").state_dict()
        torch.testing.assert_close(a["0.weight"], first / 4 + second / 4 + third / 2)
        assert torch.equal(a["1.running_mean"], seen[-1]["1.running_mean"])


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_tied_weights_come_back(tmp_path: Path, ending: str) -> None:
    workers = worker_specs(parse_chain(CHAIN), INFO)
    chain = LocalChain(workers)
    x, y = torch.randint(0, 5, (8, 4)), torch.randint(0, 5, (8, 4))
    chain.train_batch(x, y)
    output = tmp_path / f"net.{ending}"
    export_model(workers, saved(chain, tmp_path), output)
    model = load(output)
    assert torch.equal(model(x), chain.predict(x))
    if ending == "safetensors":
        tied = model.get_submodule("a.0")
        assert isinstance(tied, Tied)
        assert tied.out.weight is tied.words.weight
        expected = chain.steps[0].layers.state_dict()
        for key, value in model.get_submodule("a").state_dict().items():
            assert torch.equal(value, expected[key])


@pytest.mark.parametrize("text", [AVERAGED, CHAIN], ids=["floats", "indices"])
def test_onnx(tmp_path: Path, text: str) -> None:
    """It computes the same, for batches of any size."""
    floats = text == AVERAGED
    sample = TensorSpec(shape=(4,), dtype="float32")
    label = TensorSpec(shape=(), dtype="int64")
    info = DataInfo(sample=sample, label=label, classes=5) if floats else INFO
    workers = worker_specs(parse_chain(text), info)
    chain = LocalChain(workers)
    output = tmp_path / "net.onnx"
    export_model(workers, saved(chain, tmp_path), output)
    model = onnx.load(output)
    onnx.checker.check_model(model)
    (name,) = (one.name for one in model.graph.input)
    for size in (3, 8):
        x = torch.randn(size, 4) if floats else torch.randint(0, 5, (size, 4))
        (found,) = ReferenceEvaluator(model).run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), chain.predict(x))


def test_onnx_may_not_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dni_runtime.core.export.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="onnx and onnxscript are not installed"):
        export_model((), {}, tmp_path / "net.onnx")
