"""Modules in two partitions: one heterogeneous job on a real Slurm of three hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dni_runtime.rundir import RunDir, read_json, read_lines
from tests.e2e.conftest import Dnictl, run

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(280)]

CHAIN = """\
name: digits
seed: 3
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: {epochs}
stop_grace_s: 10
links: {{interface: {network}}}
defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
modules:
  - name: bottom
    resources: {{partition: main}}
    layers:
      - Linear: {{in_features: 64, out_features: 64}}
      - BatchNorm1d: {{num_features: 64}}
      - ReLU
  - name: top
    resources: {{partition: last}}
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""


@pytest.fixture
def dnictl(slurm: str, tmp_path: Path) -> Iterator[Dnictl]:
    """dnictl in a folder of its own; jobs that a test leaves are cancelled."""
    yield Dnictl(tmp_path)
    for record in tmp_path.glob("runs/*/job.json"):
        run(["scancel", "--quiet", json.loads(record.read_text())["job"]])


def test_two_partitions_train_through_a_requeue(dnictl: Dnictl, slurm: str) -> None:
    epochs = 30
    (dnictl.folder / "chain.yaml").write_text(CHAIN.format(network=slurm, epochs=epochs))
    submitted = dnictl.run("submit", "--backend", "process", "--parsable").stdout
    name, _, job = submitted.strip().partition(";")
    root = RunDir(dnictl.folder / "runs" / name)
    until = time.monotonic() + 100
    while int((read_json(root.worker("top")) or {}).get("step") or 0) < 40:
        assert time.monotonic() < until, root.supervisor_log.read_text()
        time.sleep(0.2)
    # as Slurm tells a job before its time limit
    assert run(["scancel", "--batch", "--signal=TERM", job]).returncode == 0
    while (read_json(root.state) or {}).get("phase") != "stopped":
        assert time.monotonic() < until, root.supervisor_log.read_text()
        time.sleep(0.2)
    shown = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %A"]
    while (said := run(shown).stdout.split())[::2] != ["PENDING"] * 2:
        assert time.monotonic() < until, said
        time.sleep(0.5)
    assert dnictl.json("status")["state"] == "queued"
    for component in said[1::2]:  # Slurm lets a requeued job wait for two minutes
        run(["scontrol", "update", f"JobId={component}", "StartTime=now"])
    dnictl.run("wait", timeout_s=150)
    figures = dnictl.json("status")
    assert (figures["state"], figures["attempt"], figures["step"]) == ("finished", 2, epochs * 23)
    assert figures["accuracy"] > 0.9
    hosts = {module["module"]: module["host"] for module in figures["modules"]}
    assert hosts["top"] == "n3"  # the one that the partition has
    assert hosts["bottom"] in ("n1", "n2", "n3")
    for module in hosts:
        seen = [
            line["epoch"] for line in read_lines(root.metrics(module)) if line["kind"] == "epoch"
        ]
        assert seen == list(range(1, epochs + 1))
    plan = read_json(root.plan)
    assert plan is not None
    groups = [[word for word in w["argv"] if "het-group" in word] for w in plan["workers"]]
    assert groups == [["--het-group=0"], ["--het-group=1"]]
    assert "PENDING" not in run(shown).stdout
