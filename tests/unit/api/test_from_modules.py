"""Chains of modules that exist, beside plain torch: what is frozen there is frozen here."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn.functional import cross_entropy

from dni_runtime import Chain
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.layers import load_initial
from dni_runtime.data import open_data
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
