"""Chains of modules that exist, beside plain torch: what is frozen there is frozen here."""

from __future__ import annotations

import copy
import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from torch import nn
from torch.nn.functional import cross_entropy

from dni_runtime import Chain
from dni_runtime.api.checkpointed import check_ending
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.layers import load_initial
from dni_runtime.data import open_data
from dni_runtime.errors import DniError, SpecError, UsageError
from dni_runtime.plan.create import create_run

SETTINGS: dict[str, Any] = {"defaults": {"interface": "exact", "optimizer": {"SGD": {"lr": 0.1}}}}


def test_it_trains_what_plain_torch_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    modules = {
        "frozen": nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)).requires_grad_(False),
        "partly": nn.Sequential(
            nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16)
        ),
        "top": nn.Linear(16, 10),
    }
    partly = modules["partly"]
    partly[0].requires_grad_(False)  # type: ignore[index]  # a Sequential
    partly[3].bias.requires_grad_(False)  # type: ignore[index]
    plain = copy.deepcopy(nn.Sequential(*modules.values()))
    data = {"dataset": "digits", "batch_size": 64, "flatten": True}
    chain = Chain.from_modules(modules, data=data, **SETTINGS)
    written = yaml.safe_load(Path("chain.yaml").read_text())["modules"]
    assert [one.get("freeze") for one in written] == [
        True,
        ["0.weight", "0.bias", "3.bias"],
        None,
    ]
    local = LocalChain(chain.prepared.workers)
    assert local.steps[0].spec.interface is not None
    assert local.steps[0].spec.interface.name == "none"
    run = create_run(tmp_path / "run", chain.prepared, backend="process")
    for step in local.steps:
        load_initial(step.layers, run.initial(step.spec.module))
    source = open_data(chain.prepared.chain.data, tmp_path, seed=0)
    for _, (x, y) in zip(range(6), source.train_batches(1), strict=False):
        local.train_batch(x, y)
        cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for p in plain.parameters():
                if p.requires_grad:
                    assert p.grad is not None
                    p -= 0.1 * p.grad
                    p.grad = None
    own = [one for step in local.steps for one in step.layers.state_dict().values()]
    for ours, theirs in zip(own, plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


OWN = """\
import numpy
import torch
from torch import nn


class Extractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.known, self.line = nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 32)

    def forward(self, x):
        return self.line(self.known(x))


class Still(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm, self._times = nn.Linear(64, 32), nn.BatchNorm1d(32), 1.0

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval().requires_grad_(False)
        return self

    def forward(self, x):
        return self.norm(self.line(x)) * self._times


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.table = nn.Linear(64, 32), numpy.random.rand(32)

    def forward(self, x):
        return self.line(x) + torch.from_numpy(self.table).float()
"""
DIGITS = {"dataset": "digits", "batch_size": 64, "flatten": True}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    return importlib.import_module("of_mine")


def test_what_train_freezes_is_frozen_from_the_first_batch(own: Any) -> None:
    plain = nn.Sequential(own.Still(), nn.Linear(32, 10)).train()
    plain[0].norm.running_mean += 1.0
    modules = {"still": copy.deepcopy(plain[0]), "top": copy.deepcopy(plain[1])}
    chain = Chain.from_modules(modules, data=DIGITS, path="my_net.yaml", **SETTINGS)
    assert chain.prepared.chain.name == "my-net"
    local = LocalChain(chain.prepared.workers)
    run = create_run(Path("run"), chain.prepared, backend="process")
    for step in local.steps:
        load_initial(step.layers, run.initial(step.spec.module))
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    source = open_data(chain.prepared.chain.data, Path.cwd(), seed=0)
    for _, (x, y) in zip(range(3), source.train_batches(1), strict=False):
        expected = cross_entropy(plain(x), y)
        assert local.train_batch(x, y) == pytest.approx(expected.item(), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    own_tensors = [one for step in local.steps for one in step.layers.state_dict().values()]
    for ours, theirs in zip(own_tensors, plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_workers_would_build_otherwise_is_refused(own: Any) -> None:
    thawed, hooked, faster = own.Extractor().requires_grad_(True), own.Extractor(), own.Still()
    hooked.line.weight.register_post_accumulate_grad_hook(lambda p: None)
    faster._times = 2.0
    poisoned = own.Still()
    poisoned.line.bias.data[3] = float("nan")
    for module, message in [
        (thawed, "'0.known.weight' is to be trained, but its class freezes it"),
        (hooked, "post_accumulate_grad_hooks of '0.line.weight' is"),
        (faster, "_times of '0' is 2.0, but 1.0 in what workers build"),
        (own.Drawn(), "table of '0' is another value in what workers build"),
        (poisoned, "'bottom.0.line.bias' in '.*chain.safetensors', for module 'bottom', has NaN"),
    ]:
        with pytest.raises(SpecError, match=message):
            Chain.from_modules({"bottom": module, "top": nn.Linear(32, 10)}, data=DIGITS)


def test_a_network_that_is_split_keeps_what_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parents[2] / "data" / "words.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "words", raising=False)
    import words  # type: ignore[import-not-found]

    model = words.Model()
    model.first.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    data = {"dataset": "words:Words", "batch_size": 8, "drop_last": True}
    chain = Chain.split(model, data=data, at=["begin", "first"], defaults={"ema": 0.5})
    frozen = [
        name.removeprefix("0.network.")
        for step in LocalChain(chain.prepared.workers).steps
        for name, p in step.layers.named_parameters()
        if not p.requires_grad
    ]
    assert frozen == ["first.weight", "first.bias", "second.bias"]
    sys.modules.pop("words", None)


DIGITS = {"dataset": "digits", "batch_size": 64, "flatten": True}


@pytest.mark.parametrize(
    ("modules", "data", "message"),
    [
        ([nn.Linear(64, 10)], {}, r"a list does not say which .*\n.*by name, as in"),
        (nn.Sequential(nn.Linear(64, 10)), {}, r"a Sequential does not say .*\n.*by name"),
        ({"a": [nn.Linear(64, 10)]}, {}, r"module 'a' is a list, .*\n.*nn.Sequential\(…\) makes"),
        ({"a": nn.Linear(64, 10)}, "digits", r"data: 'digits' is a str, .*\n.*'dataset'"),
    ],
)
def test_modules_have_names(
    modules: Any, data: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DniError, match=message):
        Chain.from_modules(modules, data=data)
    named: Any = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(32, 10)})
    assert Chain.from_modules(named, data=DIGITS).modules == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "made", "message"),
    [
        ("mine.yaml", "mine.safetensors", "'mine.safetensors' exists, and is not the weights"),
        ("mine.yaml", "mine.safetensors/", "is not the weights of 'mine.yaml'"),
        ("mine.yaml", "mine.yaml", "did not write it"),
        ("mine.yaml", "mine.yaml/", "did not write it"),
        ("no/such/mine.yaml", "other", "there is no folder 'no/such'"),
        ("mine.safetensors", "other", "the chain file and its weights"),
    ],
)
def test_files_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, made: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if made.endswith("/"):
        Path(made).mkdir()
    else:
        Path(made).write_bytes(b"\x8b of the user")
    with pytest.raises(UsageError, match=message):
        Chain.from_modules({"a": nn.Linear(64, 10)}, data=DIGITS, path=path)
    assert made.endswith("/") or Path(made).read_bytes() == b"\x8b of the user"


def test_weights_of_another_chain_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # its own are replaced
        Chain.from_modules({"a": nn.Linear(64, 10)}, data=DIGITS, path="mine.yaml")
    before = Path("mine.safetensors").read_bytes()
    with pytest.raises(UsageError, match=r"is not the weights of 'mine\.yml'"):
        Chain.from_modules({"a": nn.Linear(64, 10)}, data=DIGITS, path="mine.yml")
    with pytest.raises(UsageError, match=r"'mine\.yaml' begins with"):
        check_ending(Path("mine.safetensors"), state_dict=True)
    assert Path("mine.safetensors").read_bytes() == before


def test_settings_are_what_a_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chain = Chain.from_modules(
        {"a": nn.Linear(64, 10)},
        data=DIGITS,
        epochs=numpy.int64(2),
        loss=nn.CrossEntropyLoss,
        defaults={"optimizer": {"SGD": {"lr": torch.tensor(0.5)}}, "ema": numpy.float64(0.5)},
    )
    written = yaml.safe_load(Path("chain.yaml").read_text())
    assert (written["epochs"], written["defaults"]["ema"]) == (2, 0.5)
    assert chain.prepared.workers[0].optimizer.args == {"lr": 0.5}
    with pytest.raises(SpecError, match=r"(?s)'loss' is a MSELoss.*'import': Class"):
        Chain.from_modules({"a": nn.Linear(64, 10)}, data=DIGITS, loss=nn.MSELoss())
    with pytest.raises(UsageError, match="'defaults' is 3, not a mapping"):
        Chain.from_modules({"a": nn.Linear(64, 10)}, data=DIGITS, defaults=3)
    assert Chain.from_modules({"a": nn.Linear(64, 10)}, data=DIGITS, defaults=None).modules == ["a"]
