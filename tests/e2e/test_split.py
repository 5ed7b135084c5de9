"""A network taken apart, trained by real workers: what plain PyTorch gives, under its own names."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from dni_runtime import Chain, Run
from dni_runtime.data import open_data
from dni_runtime.errors import UsageError
from dni_runtime.plan.prepare import importing_from
from dni_runtime.spec import DataSpec
from tests.conftest import eventually
from tests.e2e.conftest import Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOURCE = Path(__file__).parents[1] / "data" / "words.py"
STEPS = 20
TORCH = version("torch").split("+")[0]


WORDS: dict[str, Any] = {"dataset": "words:Words", "batch_size": 8}
SHORTER = {"collate": "words:shorter", "max_length": 5}


@pytest.mark.parametrize("more", [{}, SHORTER], ids=["one length", "lengths"])
def test_exact_is_plain_pytorch(
    site: Site, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """A skip, tied weights and a mask cross the cuts; the result goes back into the network."""
    train_split(site, monkeypatch, "process", WORDS | more)


def train_split(
    site: Site, monkeypatch: pytest.MonkeyPatch, backend: str, data: dict[str, Any] = WORDS
) -> None:
    shutil.copy(SOURCE, site.folder)
    monkeypatch.chdir(site.folder)
    chain = Chain.split(
        "words:Model",
        data=data,
        at=["begin", "first", "second"],
        epochs=9,
        steps=STEPS,
        image={"torch": f"torch=={TORCH}"},
        defaults={"interface": "exact", "optimizer": {"Adam": {"lr": 0.01}}},
    )
    assert len(chain.modules) == 4
    if backend == "apptainer":
        site.run("build")
    site.run("up", "--backend", backend)
    site.run("export", "--state-dict", "-o", "trained.pt")
    assert "| network | words:Model |" in (site.folder / "trained.md").read_text()
    found = torch.load("trained.pt", weights_only=True)

    is_plain(site.folder, found, STEPS, data)


def is_plain(
    folder: Path, found: dict[str, torch.Tensor], steps: int, data: dict[str, Any] = WORDS
) -> None:
    """Compare trained weights with those of a plain loop."""
    with importing_from(folder):
        import words  # type: ignore[import-not-found]

        source = open_data(DataSpec(**data), folder, seed=0)
    try:
        model = words.Model()
        model.load_state_dict(load_file(folder / "chain.safetensors"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        batches = (batch for epoch in range(1, 99) for batch in source.train_batches(epoch))
        for _ in range(steps):
            (tokens, mask), y = next(batches)
            optimizer.zero_grad()
            cross_entropy(model(tokens, mask).transpose(1, 2), y).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
        words.Model().load_state_dict(found, strict=True)
    finally:
        sys.modules.pop("words", None)


def test_a_run_goes_on_with_other_cuts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and Adam's averages of four modules become those of two: as if never stopped."""
    shutil.copy(SOURCE, site.folder)
    monkeypatch.chdir(site.folder)
    four, two = (
        Chain.split(
            "words:Model",
            data={"dataset": "words:Words", "batch_size": 8},
            at=at,
            path=path,
            epochs=99,
            steps=250,
            defaults={"interface": "exact", "optimizer": {"Adam": {"lr": 0.01}}},
        )
        for path, at in (("chain.yaml", ["begin", "first", "second"]), ("two.yaml", ["first"]))
    )
    run = four.train(backend="process")
    with pytest.raises(UsageError, match="stop it first"):
        two.train(backend="process", carry=run)
    eventually("batches", lambda: (run.status().step or 0) >= 20)
    run.stop()
    assert 20 <= (run.status().step or 0) < 250
    site.run("up", "two.yaml", "--carry", run.name, "--backend", "process")
    again = Run.find(runs=site.folder / "runs")
    assert again.status().step == 250
    assert json.loads(again.directory.record.read_text())["carried"] == str(run.directory.root)
    is_plain(site.folder, again.state_dict(), 250)
    with pytest.raises(UsageError, match="has finished"):
        two.train(backend="process", carry=again)


def test_a_slow_host_gets_less(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker stands still for nine tenths of the time, as on a slower host."""
    site.run("init", "--template", "resnet")
    monkeypatch.chdir(site.folder)
    path = "split.yaml"
    chain = Chain.split(
        "resnet:ResNet",
        path=path,
        args={"channels": 1, "classes": 10},
        data={"dataset": "digits", "batch_size": 64},
        at=["stages.0"],
        epochs=999,
    )
    run = chain.train(backend="process")
    eventually("batches", lambda: (run.status().step or 0) >= 10)
    pid = run.status().modules[1].pid
    assert pid is not None
    until = time.monotonic() + 5
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.135)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.015)
    run.stop()

    told = site.json("balance", run.name)
    assert told["worthwhile"]
    assert told["faster"] > 1.2
    assert told["file"] is None
    first, second = told["modules"]
    assert (first["until"], second["until"]) == ("stages.0", None)
    assert first["better_parameters"] > first["parameters"], "the fast host gets more"
    # The first module's own time tells nothing: where it ends later, its interface is smaller.
    assert second["better_seconds"] < second["seconds"]
    assert first["host"] == second["host"] == socket.gethostname()

    said = site.run("balance", run.name, "--apply").stdout
    assert "times as many batches\nwrote " in said
    again = Chain(path).train(backend="process", carry=run)
    step = run.status().step
    assert step is not None
    eventually("further batches", lambda: (again.status().step or 0) > step + 5)
    again.stop()
    assert again.failure() is None
