"""Layers described from modules that exist: built again, they are the same."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from dni_runtime.core.layers import build_layers
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.errors import SpecError
from dni_runtime.resolve.describe import (
    ModuleDescription,
    describe_modules,
    describe_settings,
    import_path,
)
from dni_runtime.spec import LayerSpec

MINE = """\
import threading
from fractions import Fraction

import numpy
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self, width, factor=2.0):
        super().__init__()
        self.width, self.factor = width, factor
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.factor * self.inner(x)

    @classmethod
    def of(cls, width):
        return cls(width)

class Narrow(Scale):
    pass

class Settings:
    def __init__(self):
        self.rate, self.parts, self.owner = 0.5, [Fraction(1, 2)], None

def times(factor):
    return lambda x: factor * x

class Frozen(nn.BatchNorm1d):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.scale = 2.0
        self.settings, self.bend, self.lock = Settings(), times(2.0), threading.Lock()
        self.settings.owner = self
        self.mask = torch.ones(3)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.tied = nn.Linear(3, 3)
        self.tied.bias = self.inner.bias
        self._calls = 0
        self.requires_grad_(False)

    def train(self, mode=True):
        return super().train(False)

    def forward(self, x):
        self.seen = self.bend(x)
        return self.seen * getattr(self, "factor", 1.0) if hasattr(self, "note") else self.seen

class Grown(nn.Module):
    def __init__(self, scale=1.0, table=(1, 2), width=3):
        super().__init__()
        self.scale, self.width = nn.Parameter(torch.full((width,), scale)), width
        self.table = numpy.array(table)

    def forward(self, x):
        return x * self.scale * float(self.table.sum())

class Given(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.values = values

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
        nn.MaxPool2d((2, 2)),
        nn.Sequential(OrderedDict(one=nn.Sequential(OrderedDict(two=nn.Linear(2, 2))))),
        nn.Dropout(0.25),
        nn.ReLU(),
        nn.Embedding(10, 4, padding_idx=0),
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Flatten(2))),
    ],
    ids=repr,
)
def test_layers_of_torch(layer: nn.Module, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    described = describe(layer, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    built = build_layers([LayerSpec.model_validate(one) for one in described.layers])
    built.load_state_dict(described.state)
    if isinstance(layer, nn.Embedding | nn.Linear):
        x = torch.ones(2, 4, dtype=torch.int64 if isinstance(layer, nn.Embedding) else None)
        assert torch.equal(built(x), layer(x))


@pytest.mark.parametrize(
    "args",
    [
        {"cell": "GRU", "input_size": 4, "hidden_size": 3},
        {"cell": "LSTM", "input_size": 4, "hidden_size": 3, "num_layers": 2, "dropout": 0.5},
        {"cell": "RNN", "input_size": 4, "hidden_size": 3, "carry": False},
    ],
)
def test_recurrent_layers(args: dict[str, Any], tmp_path: Path) -> None:
    layer = Recurrent(**args)
    described = describe(layer, tmp_path)
    assert described.layers == [{"Recurrent": args}]
    built = build_layers([LayerSpec.model_validate(one) for one in described.layers])
    built.load_state_dict(described.state)
    x = torch.randn(2, 5, 4)
    assert torch.equal(built.eval()(x), layer.eval()(x))
    if args.get("carry", True):
        with pytest.raises(SpecError, match=r"of '0.synthesizer' is .*, but not there in what"):
            describe(Recurrent(**args, synthetic=True), tmp_path)


def describe(layer: nn.Module, folder: Path) -> ModuleDescription:
    return describe_modules({"a": layer}, folder)["a"]


def test_what_is_the_default_is_left_out(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    assert describe(layers, tmp_path).layers == [
        "ReLU",
        {"Linear": {"in_features": 4, "out_features": 3}},
    ]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine_of_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_test", raising=False)
    return "mine_of_test"


def test_classes_of_a_file(tmp_path: Path, mine: str) -> None:
    module = __import__(mine)
    entry = {"import": f"{mine}:Scale", "args": {"width": 3, "factor": 0.5}}
    assert describe(module.Scale(3, 0.5), tmp_path).layers == [entry]
    with pytest.raises(SpecError, match="does not keep its argument 'width'"):
        describe(module.Forgetful(3), tmp_path)
    changed = module.Scale(3)
    changed.inner = nn.Linear(3, 3, bias=False)
    with pytest.raises(SpecError, match=r"'0.inner.bias' is not there, but a parameter"):
        describe(changed, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(SpecError, match="it lies in"):
        describe(module.Scale(3), tmp_path / "elsewhere")


def test_arguments_of_which_numbers_were_made(tmp_path: Path, mine: str) -> None:
    """The values are in the state dict; where they are not, those of the default are compared."""
    module = __import__(mine)
    described = describe(module.Grown(0.5, width=4), tmp_path)
    assert described.layers == [{"import": f"{mine}:Grown", "args": {"width": 4}}]
    assert torch.equal(described.state["0.scale"], torch.full((4,), 0.5))
    with pytest.raises(SpecError, match="table of '0' is"):
        describe(module.Grown(table=(1, 3)), tmp_path)
    for values in (torch.ones(2), numpy.ones(2)):
        with pytest.raises(SpecError, match=r"values is a .*: a chain file holds numbers, words"):
            describe(module.Given(values), tmp_path)


def test_what_workers_cannot_import(tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(SpecError, match="workers cannot import") as caught:
        describe(Local(), tmp_path)
    assert "move it to a file" in str(caught.value)
    notebook = type("Cell", (nn.Module,), {"__module__": "__main__"})
    with pytest.raises(SpecError, match="'Cell'"):
        import_path(notebook, tmp_path)


def test_settings_as_a_script_has_them(tmp_path: Path, mine: str) -> None:
    """Arrays are lists, a partial is its function with arguments; data sets are made by workers."""
    times = importlib.import_module(mine).times
    settings = {"collate": partial(times, factor=2), "weight": torch.tensor([1.0, 2.5])}
    assert describe_settings({**settings, "lr": numpy.float32(0.5)}, tmp_path) == {
        "collate": {"import": f"{mine}:times", "args": {"factor": 2}},
        "weight": [1.0, 2.5],
        "lr": 0.5,
    }
    for value in (partial(times, 2), torch.zeros(10_000)):
        with pytest.raises(SpecError, match="a chain file holds numbers"):
            describe_settings({"x": value}, tmp_path)
    with pytest.raises(SpecError, match=r"'train': \{…\}, 'evaluation': \{…\}"):
        describe_settings({"dataset": nn.Linear(1, 1)}, tmp_path)
    narrow = importlib.import_module(mine).Narrow
    assert import_path(narrow.of, tmp_path) == f"{mine}:Narrow.of", "though it is Scale's"
    with pytest.raises(SpecError, match="lambda>', which has no name outside of functions"):
        import_path(lambda rows: rows, tmp_path)


def test_arguments_that_no_file_holds(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(4, 2)
    with pytest.raises(SpecError, match="does not keep its argument 'd_model'"):
        describe(layer, tmp_path)
    with pytest.raises(SpecError, match="RNN"):
        describe(nn.RNN(2, 3, nonlinearity="relu"), tmp_path)


def linear(change: Callable[[Any], object]) -> nn.Module:
    layer = nn.Linear(3, 3)
    change(layer)
    return nn.Sequential(layer, nn.Dropout())


def tie(*, data: bool) -> nn.Sequential:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    if data:
        first.weight.data = second.weight.data
    else:
        first.weight = second.weight
    return nn.Sequential(first, second)


def hooked() -> nn.Sequential:
    layers = nn.Sequential(nn.ReLU())
    layers.register_forward_hook(lambda *_: None)
    return layers


TWICE = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (linear(lambda it: it.register_forward_hook(lambda *_: None)), "forward_hooks of '0' is"),
        (linear(lambda it: it.register_forward_pre_hook(lambda *_: None)), "forward_pre_hooks of"),
        (linear(lambda it: it.weight.register_hook(lambda g: 2 * g)), "hooks of '0.weight' is"),
        (hooked(), "forward_hooks of the module is"),
        (linear(lambda it: setattr(it, "forward", abs)), "forward of '0' is builtins.abs"),
        (linear(lambda it: it.double()), "float64.3, 3., but a parameter float32"),
        (nn.Linear(3, 3, device="meta"), "'weight' of module 'a' has no values yet"),
        (linear(lambda it: setattr(it, "weight", nn.Parameter(torch.ones(2, 3)))), "2, 3"),
        (linear(lambda it: it.register_buffer("more", torch.ones(1))), "'0.more' is a buffer"),
        (linear(lambda it: it.eval()), "'0' is in eval mode"),
        (linear(nn.utils.parametrizations.weight_norm), "'ParametrizedLinear', which was made at"),
        (linear(nn.utils.parametrizations.orthogonal), "'ParametrizedLinear', which was made at"),
        (linear(nn.utils.spectral_norm), "forward_pre_hooks of '0' is"),
        (nn.Sequential(TWICE, nn.ReLU(), TWICE), "the memory of '2.weight' is that of '0.weight'"),
        (tie(data=False), "the memory of '1.weight' is that of '0.weight'"),
        (tie(data=True), "the memory of '1.weight' is that of '0.weight'"),
        (nn.LazyLinear(3), "has no values yet"),
    ],
)
def test_what_a_file_cannot_say_is_refused(layer: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        describe(layer, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: None, None),
        (lambda it: setattr(it, "_calls", 3), "_calls of '0' is 3, but 0"),
        (lambda it: setattr(it, "_cache", {1: torch.ones(3)}), None),
        (lambda it: setattr(it, "seen", 3), None),
        (lambda it: setattr(it, "remark", 3), None),
        (lambda it: setattr(it, "factor", 3), "factor of '0' is 3, but not there in what"),
        (lambda it: setattr(it, "note", None), "note of '0' is None, but not there in what"),
        (lambda it: setattr(it.settings, "rate", 0.4), "settings of '0' is another value in"),
        (lambda it: it.settings.parts.append(1), "settings of '0' is another value in"),
        (lambda it: setattr(it, "bend", it.bend.__globals__["times"](3.0)), "bend of '0' is .*3.0"),
        (lambda it: setattr(it, "scale", 3.0), "scale of '0' is 3.0, but 2.0"),
        (lambda it: setattr(it, "mask", torch.zeros(3)), "mask of '0' is another value"),
        (lambda it: it.table.add_(1), "the value of '0.table'"),
        (lambda it: setattr(it.tied, "bias", nn.Parameter(torch.ones(3))), "'0.tied.bias' is its"),
        (lambda it: setattr(it, "tied", nn.Identity()), "Identity, but"),
    ],
)
def test_a_class_of_your_own_makes_what_it_makes(
    change: Callable[[Any], object], message: str | None, tmp_path: Path, mine: str
) -> None:
    """Parametrizations, ties, what it freezes, an eval mode of its own: all of that is built."""
    layer = __import__(mine).Frozen(3)
    change(layer)
    if message is not None:
        with pytest.raises(SpecError, match=message):
            describe(layer, tmp_path)
        return
    described = describe(layer, tmp_path)
    assert described.freeze is False
    assert described.layers == [{"import": f"{mine}:Frozen", "args": {"num_features": 3}}]


def test_state_that_no_file_of_weights_holds(tmp_path: Path, mine: str) -> None:
    module = __import__(mine)
    module.Scale.get_extra_state = lambda self: {"steps": 3}
    with pytest.raises(SpecError, match=r"extra state of '0._extra_state'"):
        describe(module.Scale(3), tmp_path)


def test_modules_that_share(tmp_path: Path) -> None:
    shared, act = nn.Linear(3, 3), nn.ReLU()
    modules = {"a": nn.Sequential(shared, act), "b": nn.Sequential(nn.Linear(3, 3), act, shared)}
    with pytest.raises(SpecError, match=r"'a' and 'b' share '2.weight'"):
        describe_modules(modules, tmp_path)
    shared.requires_grad_(False)
    described = describe_modules(modules, tmp_path)
    assert [one.freeze for one in described.values()] == [True, ["2.weight", "2.bias"]]


def test_modes(tmp_path: Path) -> None:
    """All in eval mode is how many functions return a network; some is what train() would undo."""
    modules = {"a": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "b": nn.Linear(3, 3)}
    for module in modules.values():
        module.eval()
    describe_modules(modules, tmp_path)
    modules["b"].train()
    with pytest.raises(SpecError, match="module 'a' is in eval mode, and module 'b' is not"):
        describe_modules(modules, tmp_path)
