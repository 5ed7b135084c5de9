"""Settings that a split is asked for: which are used as in a chain file, and what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from dni_runtime import Chain
from dni_runtime.errors import DniError, SpecError, UsageError
from dni_runtime.plan.balancing import balance_chain
from dni_runtime.plan.splitting import split_chain

NETS = """\
import torch
from torch import nn


def build(outputs=10):
    inner = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    return nn.Sequential(inner, nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, outputs))


class Numbers(torch.utils.data.Dataset):
    def __init__(self, train):
        self.x, self.y = torch.randn(64, 64), torch.randn(64)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.x[index], self.y[index]
"""
DIGITS = {"dataset": "digits", "batch_size": 64, "flatten": True}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets_of_test.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("nets_of_test", None)


def split(data: dict[str, Any] = DIGITS, **given: Any) -> Chain:
    return Chain.split("nets_of_test:build", data=data, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"links": "medium"}, r"'links' is 'medium'\n.*allowed: 'fast', 'slow'"),
        ({"balance": "speed"}, r"'balance' is 'speed'\n.*allowed: 'time', 'memory', 'both'"),
        ({"modules": 0}, r"'modules' is 0\n.*a number, from 1"),
        ({"modules": "2"}, "'modules' is '2'"),
        ({"loss": ["CrossEntropyLoss"]}, "loss: .* is not a name with keywords: write 'Name'"),
        ({"loss": {"CrossEntropyLoss": 3}}, "loss: CrossEntropyLoss takes keywords, as in"),
        ({"losses": "MSELoss"}, "losses: .* is not a list"),
        ({"losses": [{"loss": 3}]}, r"losses\[0\].loss: 3 is not a name with keywords"),
        ({"defaults": {"interface": ["exact"]}}, "defaults.interface: .* is not a name with"),
        ({"defaults": {"interface": {"exact": 3}}}, "defaults.interface: exact takes keywords"),
        ({"defaults": "exact"}, "defaults: 'exact' is not a mapping"),
        ({"defaults": None}, "defaults: None is not a mapping"),
    ],
)
def test_what_is_wrong_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DniError, match=message):
        split(**given)
    assert not Path("chain.yaml").exists()


def test_what_is_wrong_in_a_file_of_settings_is_told() -> None:
    modules = [{"name": "a", "interface": {"exact": 3}}, {"name": "b"}]
    with pytest.raises(SpecError, match=r"modules\[0\].interface: exact takes keywords"):
        split_chain("nets_of_test:build", Path("a.yaml"), {"data": DIGITS, "modules": modules})


def test_one_layer_or_a_list_of_them_is_no_network() -> None:
    layer = nn.Linear(64, 10)
    for network in (layer, nn.Sequential(layer), nn.Sequential()):
        kind = type(network).__name__
        with pytest.raises(UsageError, match=rf"a layer of torch.*\n.*'def build.* nn.{kind}\("):
            Chain.split(network, data=DIGITS)


def test_better_cuts_by_the_words_that_there_are() -> None:
    chain = split(at=["0"])
    for given in ({"links": "medium"}, {"balance": "speed"}):
        with pytest.raises(DniError, match="allowed: "):
            chain.balance(**given)  # type: ignore[arg-type]


def test_labels_that_stay_at_the_last_module() -> None:
    data = {**DIGITS, "labels": "tail"}
    parts = split(data).parts
    assert [part.interface and part.interface.name for part in parts] == ["delayed", None]
    recut = balance_chain(Path("chain.yaml")).recut
    assert recut.better[0].interface == parts[0].interface
    with pytest.raises(SpecError, match="'mixed' of module 'part-1' needs labels"):
        split(data, defaults={"interface": "mixed"})


def test_several_losses() -> None:
    data = {"dataset": "nets_of_test:Numbers", "batch_size": 16}
    losses = [{"loss": "MSELoss"}, {"loss": "L1Loss", "weight": 0.5}]
    chain = split(data, args={"outputs": 1}, losses=losses)
    assert yaml.safe_load(Path("chain.yaml").read_text())["losses"] == losses
    assert len(balance_chain(Path("chain.yaml")).recut.better) == len(chain.modules)
    with pytest.raises(SpecError, match=r"losses\[0\].output: there is no output 3"):
        split(data, args={"outputs": 1}, losses=[{"loss": "MSELoss", "output": 3}])
