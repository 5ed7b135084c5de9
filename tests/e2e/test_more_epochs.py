"""A run that has finished is trained further: as if it had been one training."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest

from dni_runtime import Chain, Run
from dni_runtime.errors import UsageError
from dni_runtime.run.cuts import complete_cuts, read_document
from dni_runtime.run.documents.state import RunState
from tests.e2e.conftest import PAIR, Site, eventually

pytestmark = pytest.mark.e2e

CHAIN = """\
name: digits
seed: 3
data: {dataset: digits, batch_size: 64, flatten: true, train_limit: 512, eval_limit: 128}
epochs: %d
defaults: {interface: exact, optimizer: {Adam: {lr: 0.01}}, schedule: %s}
modules:
  - name: bottom
    layers: [{Linear: {in_features: 64, out_features: 32}}, ReLU, {Dropout: {p: 0.1}}]
  - name: top
    layers: [{Linear: {in_features: 32, out_features: 10}}]
"""
FIXED = "{StepLR: {step_size: 1, gamma: 0.5}}"
AUTO = "{CosineAnnealingLR: {T_max: auto}}"


def train(folder: Path, epochs: int, schedule: str) -> Run:
    path = folder / "chain.yaml"
    path.write_text(CHAIN % (epochs, schedule))
    run = Chain(path).train(backend="process", runs=folder / "runs")
    assert run.wait(120).phase == "finished"
    return run


@pytest.mark.timeout(300)
def test_two_epochs_and_two_more_are_four(site: Site) -> None:
    whole = train(site.folder, 4, FIXED)
    run = train(site.folder, 2, FIXED)
    with pytest.raises(UsageError, match="has trained up to epoch 2: 'epochs: 2' adds none"):
        run.resume(epochs=2)
    assert run.state().phase == "finished"
    with pytest.raises(UsageError, match="--epochs 4"):
        run.resume()
    shown = site.run("resume", run.name, "--epochs", "4").stdout
    assert "finished" in shown
    assert "epoch 4/4" in shown
    found, expected = run.state_dict(), whole.state_dict()
    assert all(found[name].equal(value) for name, value in expected.items())
    one, other = (each.status().evaluations for each in (run, whole))
    assert [each.figures for each in one] == [each.figures for each in other]
    assert [each.epoch for each in one] == [1, 2, 3, 4]
    kinds = [event.event for event in run.events()]
    assert kinds.index("run_ended") < kinds.index("run_extended") < kinds.index("run_ended", -1)
    assert run.state().phase == "finished"

    # the same by '--carry', with another learning rate in the chain
    changes = ("--set", "lr=0.002", "--set", "epochs=5")
    said = site.run("up", "--carry", run.name, "--backend", "process", *changes).stdout
    assert "epoch 5/5" in said
    last = Run.find(runs=site.folder / "runs")
    assert {spec.optimizer.args["lr"] for spec in last.record.specs()[1]} == {0.002}
    for carry in (last, last.name):
        with pytest.raises(UsageError, match="has finished what the chain asks for"):
            Chain(site.folder / "chain.yaml").train(
                carry=carry, runs=site.folder / "runs", settings={"lr": 0.002, "epochs": 5}
            )


@pytest.mark.timeout(300)
def test_a_schedule_of_the_whole_training(site: Site) -> None:
    """Its rates after two of two epochs go on as those of four: nothing else would be a cosine."""
    run = train(site.folder, 2, AUTO)
    run.resume(epochs=4)
    assert run.wait(120).phase == "finished"
    rates = [
        read_document(run.directory.checkpoint(cut, "top"))["optimizers"]["module"]["groups"][0]
        for cut in complete_cuts(run.directory, run.modules)[-2:]
    ]
    expected = [0.01 * (1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in (3, 4)]
    assert [rate["lr"] for rate in rates] == pytest.approx(expected)


@pytest.mark.timeout(300)
def test_more_epochs_that_are_interrupted(site: Site) -> None:
    """The supervisor is killed midway, and the workers too: the same command goes on to the end."""
    site.write(2, slow=True, chain=PAIR)
    site.run("up", "--backend", "process")
    said = site.run("resume", "--dry-run", "--epochs", "6").stderr
    assert "until it has 6 epochs, not 2" in said
    site.run("resume", "--dry-run", "--epochs", "1", expect=64)
    assert site.json("status")["epochs"] == 2, "nothing was written"
    site.run("resume", "-d", "--epochs", "6")
    eventually("it trains further", lambda: (site.json("status")["epoch"] or 0) >= 3)
    state = RunState.read(site.latest)
    for pid in filter(None, (state.pid, *(module.pid for module in state.modules.values()))):
        os.kill(pid, signal.SIGKILL)
    eventually("it is known", lambda: site.json("status")["state"] not in ("running", "starting"))
    site.run("resume")
    figures = site.json("status")
    assert (figures["state"], figures["epoch"], figures["epochs"]) == ("finished", 6, 6)
    assert [each.epoch for each in site.figures.evaluations] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UsageError, match="has trained up to epoch 6: "):
        Run.open(site.latest.root).resume(epochs=6)
