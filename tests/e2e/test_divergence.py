"""Real workers that meet numbers that are not finite: what ``on_nan`` says is what happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import MODULES, Site
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SPOIL = """\
import math
from torch import nn

class Spoil(nn.Module):
    def __init__(self, batches, lasting=False):
        super().__init__()
        self.batches, self.lasting, self.count = batches, lasting, 0
    def forward(self, h):
        self.count += self.training
        if self.training and (self.count in self.batches or self.lasting and self.count > 60):
            return h * math.nan
        return h
"""
EPOCHS, BATCHES = 6, 23
BROKEN = """\
import torch

class Broken(torch.utils.data.Dataset):
    classes = ["low", "high"]
    def __init__(self, train):
        self.x = torch.randn(640, 64, generator=torch.Generator().manual_seed(0))
        self.y = (self.x.sum(1) > 0).long()
        if train:
            self.x[5, 3] = torch.inf
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], self.y[index]
"""
DATA = "dataset: 'broken:Broken', batch_size: 64"


def write(site: Site, spoil: str, *settings: str) -> Path:
    """A chain whose module in the middle spoils some of its activations."""
    (site.folder / "spoil.py").write_text(SPOIL)
    path = site.write(EPOCHS, *settings)
    first, middle = path.read_text().split("- name: middle")
    middle = middle.replace("ReLU]", f"ReLU, {{import: 'spoil:Spoil', args: {spoil}}}]", 1)
    path.write_text(f"{first}- name: middle{middle}")
    return path


def diverged(site: Site) -> list[dict[str, Any]]:
    return [e for e in read_lines(site.latest.events) if e["event"] == "worker_diverged"]


def weights(site: Site, *options: str) -> dict[str, torch.Tensor]:
    file = site.folder / "model.safetensors"
    site.run("export", "-o", file, "--force", *options)
    return load_file(file)


def finite(tensors: dict[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_a_run_stops_where_a_module_diverges(site: Site) -> None:
    write(site, "{batches: [80]}")
    done = site.run("up", expect=79)
    (event,) = diverged(site)
    assert (event["module"], event["what"]) == ("middle", "the activation")
    words = f"module 'middle' has diverged: the activation is not finite at batch {event['batch']}"
    assert words in done.stderr
    shown = site.json("status")
    assert (shown["state"], shown["exit_code"]) == ("failed", 79)
    assert shown["error"] == words
    spoilt = {module["module"]: module["diverged"] for module in shown["modules"]}
    assert spoilt["middle"]["batch"] == event["batch"]
    assert (spoilt["bottom"], spoilt["top"]) == (None, None)  # it went no further
    assert len(site.cuts()) >= 2
    assert finite(weights(site))
    site.run("resume")  # the layer counts anew
    assert site.json("status")["state"] == "finished"


@pytest.mark.parametrize("interface", ["mixed", "exact"])
def test_batches_that_are_not_finite_are_skipped(site: Site, interface: str) -> None:
    settings = f"defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}, interface: {interface}}}"
    path = write(site, "{batches: [30, 31, 32, 80]}", "on_nan: skip")
    path.write_text(
        path.read_text().replace("defaults: {optimizer: {Adam: {lr: 0.002}}}", settings)
    )
    site.run("up")
    shown = site.json("status")
    bottom, middle, top = shown["modules"]
    assert [middle["diverged"][key] for key in ("what", "times")] == ["the activation", 4]
    assert [event["times"] for event in diverged(site) if event["module"] == "middle"][-1] == 4
    assert (bottom["step"], middle["step"]) == (EPOCHS * BATCHES, EPOCHS * BATCHES)
    assert top["step"] == EPOCHS * BATCHES - 4
    assert bottom["diverged"]["what"] == "the gradient from 'middle'"
    assert finite(weights(site))
    assert shown["accuracy"] > 0.85


def test_a_sample_that_is_not_finite_is_skipped(site: Site) -> None:
    """Before any layer's statistics have seen it."""
    (site.folder / "broken.py").write_text(BROKEN)
    path = site.write(4, "on_nan: skip")
    path.write_text(
        path.read_text()
        .replace("dataset: digits, batch_size: 64, flatten: true", DATA)
        .replace("out_features: 10}", "out_features: 2}")
    )
    site.run("up")
    bottom, middle, top = site.json("status")["modules"]
    assert [bottom["diverged"][key] for key in ("what", "times")] == ["the data", 4]
    assert (middle["diverged"], top["diverged"]) == (None, None)
    assert (bottom["step"], top["step"]) == (40, 36)
    assert finite(weights(site))


def test_a_checkpoint_that_is_not_finite_displaces_none_that_is(site: Site) -> None:
    write(site, "{batches: [], lasting: true}", "on_nan: warn")
    site.run("up")
    assert diverged(site)
    assert site.json("status")["state"] == "finished"
    newest, *_ = sorted((int(p.name) for p in site.latest.checkpoints.iterdir()), reverse=True)
    good = site.cuts(MODULES)
    assert len(good) >= 1
    assert newest not in good
    assert len(list(site.latest.checkpoints.iterdir())) == 3
    assert finite(weights(site))
    file = site.folder / "spoilt.safetensors"
    refused = site.run("export", "-o", file, "--from", str(newest), expect=79).stderr
    assert "not finite" in refused
    assert "--force" in refused
    assert not file.exists()
    assert not finite(weights(site, "--from", str(newest)))
    assert "not finite" in (site.folder / "model.md").read_text()
