"""Modules with several inputs, as real workers: beside backpropagation, killed, stopped, in tcp."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime import Run
from dni_runtime.core.chain import Backprop
from dni_runtime.data import DataSource
from dni_runtime.measure.reference import opened
from dni_runtime.run.documents.state import RunState
from tests.e2e.conftest import PAUSE, PAUSES, Site, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAIN = """\
name: net
seed: 3
data: {dataset: %s, batch_size: 64}
epochs: %d
restart: {backoff_s: 0.1, snapshot_s: 1}
links: %s
defaults: {interface: %s, optimizer: {Adam: {lr: 0.005}}}
modules:
"""
DIGITS = "digits, flatten: true, drop_last: true"
"""Batches of a power of two: see docs/architecture.md, ``exact``."""
DIAMOND = """\
- {name: stem, layers: [{Linear: {in_features: 64, out_features: 32}}, ReLU%s]}
- {name: left, layers: [{Linear: {in_features: 32, out_features: 32}}, ReLU]}
- {name: right, inputs: stem, layers: [{Linear: {in_features: 32, out_features: 32}}, Tanh]}
- {name: top, inputs: [left, right, stem], layers: [Concat, {Linear: {in_features: 96, out_features: 10}}]}
"""  # noqa: E501
TWO_INPUTS = """\
- {name: image, inputs: [data.0], layers: [{Linear: {in_features: 8, out_features: 16}}, ReLU]}
- {name: text, inputs: [data.1], layers: [{Embedding: {num_embeddings: 4, embedding_dim: 8}}, Flatten, {Linear: {in_features: 24, out_features: 16}}, ReLU]}
- {name: both, inputs: [image, text], layers: [{Bilinear: {in1_features: 16, in2_features: 16, out_features: 16}}, ReLU]}
- {name: top, inputs: [both, data.0], layers: [Concat, {import: 'pairs:Two'}]}
losses:
- {loss: CrossEntropyLoss}
- {loss: MSELoss, output: 1, label: 1, weight: 0.5}
"""  # noqa: E501
U_SHAPE = """\
- {name: down, layers: [{import: 'fork:Fork', args: {features: 32}}]}
- {name: low, inputs: down.0, layers: [{Linear: {in_features: 16, out_features: 8}}, ReLU]}
- {name: up, inputs: [low, down.1], layers: [Concat, {Linear: {in_features: 40, out_features: 32}}, ReLU]}
- {name: top, inputs: [up, down], layers: [Concat, {Linear: {in_features: 80, out_features: 10}}]}
"""  # noqa: E501
FORK = """\
from torch import nn

class Fork(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, features), nn.Linear(features, features // 2)

    def forward(self, x):
        h = self.wide(x).relu()
        return self.narrow(h), h
"""
PAIRS = """\
import torch
from torch import nn
from torch.utils.data import Dataset

class Pairs(Dataset):
    def __init__(self, train):
        draw = torch.Generator().manual_seed(int(train))
        count = 1024 if train else 256
        self.image = torch.randn(count, 8, generator=draw)
        self.text = torch.randint(0, 4, (count, 3), generator=draw)
        self.label = (self.image[:, :3].argmax(1) + self.text[:, 0]) % 4

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        image = self.image[index]
        return (image, self.text[index]), (self.label[index], image[:2].square())

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.numbers = nn.Linear(24, 4), nn.Linear(24, 2)

    def forward(self, h):
        return self.scores(h), self.numbers(h)
"""
IPC, CURVE = "{}", "{transport: tcp, interface: lo, security: curve}"


def write(
    site: Site, modules: str, interface: str, *, data: str = DIGITS, epochs: int = 3,
    links: str = IPC,
) -> Path:  # fmt: skip
    (site.folder / "pairs.py").write_text(PAIRS)
    (site.folder / "pause.py").write_text(PAUSE)
    (site.folder / "fork.py").write_text(FORK)
    path = site.folder / "chain.yaml"
    path.write_text(CHAIN % (data, epochs, links, interface) + modules)
    return path


def up(site: Site, *arguments: Any, **settings: Any) -> Run:
    site.run("up", write(site, *arguments, **settings), "--backend", "process")
    return Run.open(site.latest.root)


@contextmanager
def backpropagation(run: Run) -> Iterator[tuple[Backprop, DataSource]]:
    """The same network, trained in one process, and its data."""
    with opened(run.record, 1) as (chain, _, reference, source):
        for epoch in range(1, chain.epochs + 1):
            for x, y_BY in source.train_batches(epoch):
                reference.train_batch(x, y_BY)
            reference.end_epoch()
        yield reference, source


def pid_of(site: Site, name: str) -> int | None:
    return RunState.read(site.latest).modules[name].pid


def assert_same(run: Run) -> None:
    found = run.model().state_dict()
    with backpropagation(run) as (reference, _):
        wanted = reference.model.state_dict().values()
    for (name, ours), theirs in zip(found.items(), wanted, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("modules", "data", "links"),
    [
        (DIAMOND % "", DIGITS, CURVE),
        (U_SHAPE, DIGITS, IPC),
        (TWO_INPUTS, '"pairs:Pairs"', IPC),
    ],
    ids=["diamond over encrypted tcp", "u-shape of several outputs", "two inputs and two losses"],
)
def test_exact_is_backpropagation_bit_for_bit(
    site: Site, modules: str, data: str, links: str
) -> None:
    run = up(site, modules, "exact", data=data, links=links, epochs=4)
    assert_same(run)
    figures = run.status()
    wanted = {"loss": figures.loss, "accuracy": figures.accuracy}
    found = {"accuracy": None, **run.evaluate()}  # of several losses there is none
    assert found == pytest.approx(wanted, abs=1e-6)


def test_neither_a_kill_nor_a_stop_changes_a_bit(site: Site) -> None:
    """With ``exact`` all go back to the newest checkpoint, and each batch counts once."""
    path = write(site, DIAMOND % f", {PAUSES}", "exact", epochs=4)
    site.run("up", path, "--backend", "process", "-d")
    run = Run.open(site.latest.root)
    eventually("a checkpoint", lambda: site.cuts(list(run.modules)))
    pid = pid_of(site, "right")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually("a restart", lambda: pid_of(site, "right") not in (None, pid))
    step = run.status().modules[-1].step or 0
    eventually("it trains again", lambda: (run.status().modules[-1].step or 0) > step)
    run.stop()
    assert run.state().phase == "stopped"
    site.run("resume")
    assert run.state().phase == "finished"
    assert_same(run)


def test_what_validate_shows(site: Site) -> None:
    path = write(site, TWO_INPUTS, "mixed", data='"pairs:Pairs"')
    found = site.json("validate", path)
    assert [row["inputs"] for row in found["modules"]] == [
        ["data.0"], ["data.1"], ["image", "text"], ["both", "data.0"],
    ]  # fmt: skip
    shown = site.run("validate", path).stdout
    assert "both, data.0" in shown
    path.write_text(path.read_text().replace("links: {}", "links: {window: 1}"))
    error = site.run("validate", path, expect=78).stderr
    assert "chain.yaml" in error
    assert "Set 'window: 2' or more" in error
