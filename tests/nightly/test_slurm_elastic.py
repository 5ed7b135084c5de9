"""Replicas in containers on three hosts: fewer, more, a lost host; under three strategies."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

import pytest

from dni_runtime import Run
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from tests.e2e.conftest import FOREVER, PAUSE, PAUSES, Dnictl, dnictl, slurm, tool
from tests.e2e.test_slurm import eventually
from tests.e2e.test_slurm_nodes import events, fault, healed
from tests.lines import read_lines

__all__ = ["dnictl", "healed", "slurm", "tool"]

pytestmark = [
    pytest.mark.e2e, pytest.mark.slurm, pytest.mark.apptainer, pytest.mark.timeout(600),
]  # fmt: skip

CHAIN = """\
name: elastic
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: {epochs}
stop_grace_s: 10
restart: {{backoff_s: 0.1, snapshot_s: 1}}
links: {{interface: {network}}}
image: {{torch: "torch=={torch}"}}
placement: {{strategy: explicit, map: {{stem: 0, wide.1: 0, wide.2: 1, wide.3: 2, top: 1}}}}
replication: {{strategy: {strategy}, every: 10}}
defaults: {{interface: mixed, optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
modules:
  - name: stem
    layers: [{{Linear: {{in_features: 64, out_features: 64}}}}, ReLU, {pause}]
  - name: wide
    replicas: {{start: 3, most: 3}}
    layers: [{{Linear: {{in_features: 64, out_features: 32}}}}, ReLU]
  - name: top
    layers: [{{Linear: {{in_features: 32, out_features: 10}}}}]
"""
WIDE = ["wide.1", "wide.2", "wide.3"]
BATCHES = 23  # of an epoch


@pytest.mark.parametrize("strategy", ["local-sgd", "all-reduce", "parameter-server"])
def test_no_batch_is_lost_or_trained_on_twice(
    tool: Apptainer, slurm: str, dnictl: Dnictl, strategy: str
) -> None:
    (dnictl.folder / "pause.py").write_text(PAUSE)
    torch = version("torch").split("+")[0]
    text = CHAIN.format(epochs=FOREVER, network=slurm, torch=torch, strategy=strategy, pause=PAUSES)
    (dnictl.folder / "chain.yaml").write_text(text)
    dnictl.run("build")
    said = dnictl.run("submit", "--backend", "apptainer", "--parsable").stdout
    root = RunDir(dnictl.folder / "runs" / said.strip().partition(";")[0])

    def step() -> int:
        return Run.open(root.root).status().step or 0

    def trained(replicas: int) -> bool:
        modules = RunState.read(root).modules
        if sum(modules[one].state == "running" for one in WIDE if one in modules) != replicas:
            return False
        now = step()
        time.sleep(0.2)
        return now > 0 and step() > now

    def change(what: Callable[[], object], replicas: int) -> float:
        began = time.monotonic()
        what()
        eventually(f"{replicas} replicas are trained", lambda: trained(replicas), within_s=200)
        return time.monotonic() - began

    eventually("it trains", lambda: trained(3))
    seconds = {
        "fewer": change(lambda: dnictl.run("scale", "wide=2"), 2),
        "more": change(lambda: dnictl.run("scale", "wide=3"), 3),
        "a lost host": change(lambda: fault("lose", "3"), 2),
    }
    assert [event["node"] for event in events(root, "node_lost")] == ["n3"]
    assert len(events(root, "replica_lost")) == 1
    assert dnictl.json("stop")["state"] == "stopped"
    found = {one["module"]: one for one in dnictl.json("status")["modules"]}
    counted = sum(found[name]["step"] or 0 for name in WIDE)
    assert found["stem"]["step"] == counted == found["top"]["step"] > 0
    epochs = [line for line in read_lines(root.metrics("top")) if line["kind"] == "epoch"]
    assert {line["epoch"]: line["batches"] for line in epochs} == dict.fromkeys(
        range(1, len({line["epoch"] for line in epochs}) + 1), BATCHES
    )
    shown = ", ".join(f"{what}: {spent:.1f} s" for what, spent in seconds.items())
    print(f"{strategy}: {shown}; {counted} batches")
