"""Taking a chain home: the whole network from its modules' checkpoints."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file
from torch import Tensor, nn

from dni_runtime import load
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.export import METADATA, export_model
from dni_runtime.errors import DataError, UsageError
from dni_runtime.spec import DataInfo
from dni_runtime.worker.checkpoint import copy_state
from tests.specs import float32, int64, specs_of, varying


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


class EachAlone(nn.Module):
    """A loop over samples, which a program of torch.export has as often as its example."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([one.cumsum(0) for one in x])


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
INFO = DataInfo(sample=int64(4), label=int64(4), classes=5)


def saved(chain: LocalChain, folder: Path) -> dict[str, Path]:
    """A checkpoint of each module."""
    states = {}
    for step in chain.steps:
        states[step.spec.module] = folder / f"{step.spec.module}.safetensors"
        save_file(copy_state(step)[0], states[step.spec.module])
    return states


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_averages_of_weights_are_exported(tmp_path: Path, ending: str) -> None:
    """Of modules that keep one: what trains nothing has none, whatever the defaults say."""
    info = DataInfo(sample=float32(4), label=int64(), classes=5)
    workers = specs_of(AVERAGED, info)
    chain = LocalChain(workers)
    seen: list[dict[str, Tensor]] = []
    for x in torch.randn(3, 8, 4):
        chain.train_batch(x, x.argmax(1))
        seen.append({k: v.clone() for k, v in chain.steps[0].layers.state_dict().items()})
    output = tmp_path / f"net.{ending}"
    export_model(workers, saved(chain, tmp_path), output)
    model = load(output, trust=ending == "pt2")
    x = torch.randn(8, 4)
    torch.testing.assert_close(model(x), chain.predict(x))
    if ending == "safetensors":
        first, second, third = (one["0.weight"] for one in seen)
        a = model.get_submodule("a").state_dict()
        torch.testing.assert_close(a["0.weight"], first / 4 + second / 4 + third / 2)
        assert torch.equal(a["1.running_mean"], seen[-1]["1.running_mean"])


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_tied_weights_come_back(tmp_path: Path, ending: str) -> None:
    workers = specs_of(CHAIN, INFO)
    chain = LocalChain(workers)
    x, y = torch.randint(0, 5, (8, 4)), torch.randint(0, 5, (8, 4))
    chain.train_batch(x, y)
    output = tmp_path / f"net.{ending}"
    export_model(workers, saved(chain, tmp_path), output)
    model = load(output, trust=True)
    assert torch.equal(model(x), chain.predict(x))
    if ending == "safetensors":
        tied = model.get_submodule("a.0")
        assert isinstance(tied, Tied)
        assert tied.out.weight is tied.words.weight
        expected = chain.steps[0].layers.state_dict()
        for key, value in model.get_submodule("a").state_dict().items():
            assert torch.equal(value, expected[key])


@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_a_program_takes_any_number_of_samples(tmp_path: Path, ending: str) -> None:
    text = AVERAGED.replace("[ReLU]", f"[{{import: '{__name__}:EachAlone'}}]")
    workers = specs_of(text, DataInfo(sample=float32(4), label=int64(), classes=5))
    states = saved(LocalChain(workers), tmp_path)
    with pytest.raises(UsageError, match="takes the number of samples for a fixed one"):
        export_model(workers, states, tmp_path / f"net.{ending}")
    assert not (tmp_path / f"net.{ending}").exists()


@pytest.mark.parametrize("what", ["floats", "indices", "lengths"])
def test_onnx(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """It computes the same, for batches of any size; torch tells nothing beside it."""
    floats, text = what == "floats", AVERAGED if what == "floats" else CHAIN
    info = DataInfo(sample=float32(4), label=int64(), classes=5) if floats else INFO
    if what == "lengths":
        sample = varying(int64(4))
        info = info.model_copy(update={"sample": sample, "label": varying(int64(4))})
    workers = specs_of(text, info)
    chain = LocalChain(workers)
    output = tmp_path / "net.onnx"
    log = logging.getLogger("torch.onnx")  # which has handlers of its own
    log.addHandler(caplog.handler)
    export_model(workers, saved(chain, tmp_path), output)
    log.removeHandler(caplog.handler)
    assert [one.getMessage() for one in caplog.records if one.levelno > logging.INFO] == []
    model = onnx.load(output)
    onnx.checker.check_model(model)
    (name,) = (one.name for one in model.graph.input)
    for size, length in ((3, 4), (8, 2 if what == "lengths" else 4)):
        x = torch.randn(size, 4) if floats else torch.randint(0, 5, (size, length))
        (found,) = ReferenceEvaluator(model).run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), chain.predict(x))


def written(path: Path, *layers: Any, name: str = "a", data: tuple[int, ...] = (0,)) -> Path:
    """A file as somebody else may have made it."""
    modules = [{"name": name, "inputs": (), "data": data, "layers": layers}]
    sample = {"shape": [4], "dtype": "float32"}
    description = {"format": 1, "chain": "c", "inputs": [sample], "outputs": [sample]}
    description["modules"] = modules
    save_file({"x": torch.zeros(1)}, path, {METADATA: json.dumps(description)})
    return path


NETWORK = {"import": "planted:build", "args": {}, "example": ["float32[4]"]}
OPTIMIZED = {
    "cell": "RNN",
    "input_size": 4,
    "hidden_size": 4,
    "synthetic": {"optimizer": {"import": "planted:build"}},
}
PLANTED: dict[str, Any] = {
    "layer": {"import": "planted:build"},
    "inner": {"Residual": {"layers": ["ReLU"], "shortcut": [{"import": "planted:build"}]}},
    "piece": {"Piece": {"network": NETWORK}},
    "optimizer": {"Recurrent": OPTIMIZED},
    "inner piece": {"Sequential": [{"Sequential": [{"Piece": {"network": NETWORK}}]}]},
}


@pytest.mark.parametrize("kind", PLANTED)
def test_nothing_of_a_file_is_imported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that is asked for: then it is."""
    (tmp_path / "planted.py").write_text("def build(**args):\n    raise SystemError('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = written(tmp_path / "model.safetensors", PLANTED[kind])
    with pytest.raises(UsageError, match=r"'planted:build' would be imported") as caught:
        load(file)
    assert "trust=True" in str(caught.value)
    assert "planted" not in sys.modules
    with pytest.raises(DataError):
        load(file, trust=True)
    assert sys.modules.pop("planted", None) is not None


def test_a_program_is_a_pickle(tmp_path: Path) -> None:
    """``torch.export.load`` unpickles what it does not know."""
    (tmp_path / "model.pt2").write_bytes(b"")
    with pytest.raises(UsageError, match="trust=True"):
        load(tmp_path / "model.pt2")


def test_names_of_modules_are_no_code(tmp_path: Path) -> None:
    """Torch's graphs write them into Python code."""
    code = 'a", exec("import planted")) #'
    with pytest.raises(DataError, match="has no network that 'dnictl export' wrote"):
        load(written(tmp_path / "model.safetensors", "ReLU", name=code, data=(0, 1)))


def test_a_network_is_not_larger_than_its_tensors(tmp_path: Path) -> None:
    """4 TB here, for which there is no memory."""
    large = {"Linear": {"in_features": 1_000_000, "out_features": 1_000_000}}
    with pytest.raises(DataError, match=r"'a\.0\.weight' has shape .* and is missing"):
        load(written(tmp_path / "model.safetensors", large))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", "[]", '{"modules": 1}', '{"modules": [{"layers": ["Pieces"]}]}']
)
def test_a_file_that_says_something_else(text: str, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", {METADATA: text})
    with pytest.raises(DataError, match=r"model\.safetensors"):
        load(tmp_path / "model.safetensors")


OF_FOUR = DataInfo(sample=float32(4), label=int64(), classes=5)
IN_PLACE = """\
name: x
data: {batch_size: 8}
defaults: {interface: exact, optimizer: {SGD: {lr: 0.1}}}
modules:
  - {name: a, layers: [{Linear: {in_features: 4, out_features: 5}}]}
  - {name: b, layers: [LAYERS]}
  - {name: c, layers: [{Linear: {in_features: 5, out_features: 5}}]}
"""
BODY = "[{ReLU: {inplace: true}}, {Linear: {in_features: 5, out_features: 5}}]"


@pytest.mark.parametrize("first", ["", "{Linear: {in_features: 5, out_features: 5}}, "])
def test_a_residual_block_adds_what_it_got(tmp_path: Path, first: str) -> None:
    """He et al. 2016, eq. 1, though its body changes its input in place."""
    workers = specs_of(IN_PLACE.replace("LAYERS", f"{first}{{Residual: {BODY}}}"), OF_FOUR)
    chain = LocalChain(workers)
    x = torch.randn(8, 4)
    chain.train_batch(x, x.argmax(1))
    block = chain.steps[1].layers
    with torch.no_grad():
        h = chain.steps[0].layers(x)
        h = block[0](h) if first else h
        p = chain.steps[2].layers(h + block[-1].body[1](h.relu()))
    torch.testing.assert_close(chain.predict(x), p)
    export_model(workers, saved(chain, tmp_path), tmp_path / "net.safetensors")
    torch.testing.assert_close(load(tmp_path / "net.safetensors")(x), p)


BOTH = """name: x
data: {batch_size: 8}
defaults: {interface: exact, optimizer: {SGD: {lr: 0.1}}}
modules:
  - name: a
    inputs: [data.0]
    layers: [{ReLU: {inplace: true}}, {Linear: {in_features: 4, out_features: 5}}]
  - name: b
    inputs: [a, data.0]
    layers: [Concat, {Linear: {in_features: 9, out_features: 5}}]
"""


def test_an_input_of_the_data_is_not_changed_for_others(tmp_path: Path) -> None:
    workers = specs_of(BOTH, OF_FOUR)
    chain = LocalChain(workers)
    x = torch.randn(8, 4)
    chain.train_batch(x, x.argmax(1))
    export_model(workers, saved(chain, tmp_path), tmp_path / "net.safetensors")
    model = load(tmp_path / "net.safetensors")
    torch.testing.assert_close(model(x.clone()), chain.predict(x))
