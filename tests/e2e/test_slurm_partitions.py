"""Modules in two partitions: one heterogeneous job on a real Slurm of three hosts."""

from __future__ import annotations

import pytest

from dni_runtime.files import read_json
from tests.e2e.conftest import Dnictl, run
from tests.e2e.test_slurm import (
    eventually,
    is_requeued,
    slow_chain,
    started_again,
    states_of,
    submitted,
    training,
)
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(280)]

EPOCHS = 10
PARTITIONS = {"bottom": "main", "top": "last"}


def test_two_partitions_train_through_a_requeue(dnictl: Dnictl, slurm: str) -> None:
    slow_chain(dnictl.folder, slurm, EPOCHS)
    path = dnictl.folder / "chain.yaml"
    text = path.read_text()
    for module, partition in PARTITIONS.items():
        named = f"  - name: {module}\n"
        assert named in text
        text = text.replace(named, f"{named}    resources: {{partition: {partition}}}\n")
    path.write_text(text)
    root, job = submitted(dnictl)
    eventually("it trains", lambda: training(root))
    # as Slurm tells a job before its time limit
    assert run(["scancel", "--batch", "--signal=TERM", job]).returncode == 0
    eventually("the job is requeued", lambda: is_requeued(job))
    assert len(states_of(job)) == 2
    assert (read_json(root.state) or {})["phase"] == "stopped"
    assert dnictl.json("status")["state"] == "queued"
    started_again(job)
    dnictl.run("wait", timeout_s=150)
    figures = dnictl.json("status")
    assert (figures["state"], figures["attempt"], figures["step"]) == ("finished", 2, EPOCHS * 23)
    assert figures["accuracy"] > 0.9
    hosts = {module["module"]: module["host"] for module in figures["modules"]}
    assert hosts["top"] == "n3"  # the one that the partition has
    assert hosts["bottom"] in ("n1", "n2", "n3")
    for module in hosts:
        seen = [
            line["epoch"] for line in read_lines(root.metrics(module)) if line["kind"] == "epoch"
        ]
        assert seen == list(range(1, EPOCHS + 1))
    plan = read_json(root.plan)
    assert plan is not None
    groups = [worker["scheduler_args"] for worker in plan["workers"]]
    assert groups == [["--het-group=0"], ["--het-group=1"]]
    assert "PENDING" not in states_of(job).values()
