"""Layers described from modules that exist: built again, they are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dni_runtime.core.describe import import_path, layer_entry
from dni_runtime.core.layers import build_layer
from dni_runtime.errors import SpecError
from dni_runtime.spec import LayerSpec

MINE = """\
from torch import nn

class Scale(nn.Module):
    def __init__(self, width, factor=2.0):
        super().__init__()
        self.width, self.factor = width, factor
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.factor * self.inner(x)

class Forgetful(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
"""


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 3, bias=False),
        nn.Conv2d(1, 2, 3, stride=2, padding="valid", groups=1),
        nn.Conv2d(2, 2, (3, 1), padding=(1, 0), padding_mode="circular"),
        nn.BatchNorm1d(5, momentum=None, affine=False),
        nn.LayerNorm([3, 4], bias=False),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.ReLU(),
        nn.Embedding(10, 4, padding_idx=0),
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Flatten(2))),
    ],
    ids=repr,
)
def test_layers_of_torch(layer: nn.Module, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    spec = LayerSpec.model_validate(layer_entry(layer, tmp_path))
    assert torch.equal(torch.random.get_rng_state(), state)
    built = build_layer(spec)
    assert repr(built) == repr(layer)
    built.load_state_dict(layer.state_dict())


def test_what_is_the_default_is_left_out(tmp_path: Path) -> None:
    assert layer_entry(nn.ReLU(), tmp_path) == "ReLU"
    assert layer_entry(nn.Linear(4, 3), tmp_path) == {
        "Linear": {"in_features": 4, "out_features": 3}
    }


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine_of_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_test", raising=False)
    return "mine_of_test"


def test_classes_of_a_file(tmp_path: Path, mine: str) -> None:
    module = __import__(mine)
    entry = {"import": f"{mine}:Scale", "args": {"width": 3, "factor": 0.5}}
    assert layer_entry(module.Scale(3, 0.5), tmp_path) == entry
    with pytest.raises(SpecError, match="does not keep its argument 'width'"):
        layer_entry(module.Forgetful(3), tmp_path)
    changed = module.Scale(3)
    changed.inner = nn.Linear(3, 3, bias=False)
    with pytest.raises(SpecError, match="build another layer"):
        layer_entry(changed, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(SpecError, match="it lies in"):
        layer_entry(module.Scale(3), tmp_path / "elsewhere")


def test_what_workers_cannot_import(tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(SpecError, match="workers cannot import") as caught:
        layer_entry(Local(), tmp_path)
    assert "move it to a file" in str(caught.value)
    notebook = type("Cell", (nn.Module,), {"__module__": "__main__"})
    with pytest.raises(SpecError, match="'Cell'"):
        import_path(notebook, tmp_path)


def test_arguments_that_no_file_holds(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(4, 2)
    with pytest.raises(SpecError, match="does not keep its argument 'd_model'"):
        layer_entry(layer, tmp_path)
    with pytest.raises(SpecError, match="RNN"):
        layer_entry(nn.RNN(2, 3, nonlinearity="relu"), tmp_path)
