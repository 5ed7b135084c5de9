"""What clusters do to jobs, on the real Slurm of three hosts: no batch of any epoch is left out."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.ledger import Counts
from tests.e2e.conftest import Dnictl, command_of, processes_of, run
from tests.e2e.test_slurm import (
    ROOT,
    eventually,
    slow_chain,
    started_again,
    submitted,
    training,
)
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(300)]

MODULES = ("bottom", "middle", "top")
BATCHES = 23  # in an epoch
EPOCHS = 14
CUT_S = 13
"""Longer than TCP waits before it gives a connection up, shorter than Slurm gives a node up."""
BACK_S = 9
"""TCP would wait 12 s before it tries again."""


def begin(dnictl: Dnictl, network: str) -> tuple[RunDir, str]:
    """A job on three hosts that trains."""
    slow_chain(dnictl.folder, network, EPOCHS, MODULES[:-1])
    root, job = submitted(dnictl, "--nodes=3")
    eventually("it trains", lambda: training(root))
    return root, job


def events(root: RunDir, *names: str) -> list[dict[str, Any]]:
    return [one for one in read_lines(root.events) if one["event"] in names]


def steps(root: RunDir, name: str) -> int:
    """Batches that a module has trained on, up to this moment."""
    return (Counts.read(root.ledger(name)) or Counts()).step


def finished(dnictl: Dnictl, root: RunDir) -> dict[str, Any]:
    """Wait for the end: each module has acknowledged each batch of each epoch once."""
    dnictl.run("wait", timeout_s=200)
    figures: dict[str, Any] = dnictl.json("status")
    assert (figures["state"], figures["exit_code"]) == ("finished", 0)
    assert [one["step"] for one in figures["modules"]] == [EPOCHS * BATCHES] * 3
    for name in MODULES:
        lines = [one for one in read_lines(root.metrics(name)) if one["kind"] == "epoch"]
        counted = {one["epoch"]: one["batches"] for one in lines}
        assert counted == dict.fromkeys(range(1, EPOCHS + 1), BATCHES), name
    evaluations = {one["epoch"]: one["samples"] for one in figures["evaluations"]}
    assert evaluations == dict.fromkeys(range(1, EPOCHS + 1), 360)
    assert figures["accuracy"] > 0.9
    return figures


def test_a_supervisor_is_killed_and_a_host_is_cut_off(dnictl: Dnictl, slurm: str) -> None:
    """The next supervisor finds its workers, the links come back: nothing is restarted."""
    root, _ = begin(dnictl, slurm)
    (killed,) = [pid for pid in processes_of(root.root) if b"supervise" in command_of(pid)]
    os.kill(killed, signal.SIGKILL)
    adopted = partial(events, root, "run_adopted")
    eventually("the next supervisor", adopted)
    assert [one["modules"] for one in adopted()] == [list(MODULES)]
    testbed = str(Path(os.environ["SLURM_CONF"]).parent)
    cut = run([ROOT / "scripts" / "slurm-testbed", "cut", "2", str(CUT_S), "--dir", testbed])
    assert cut.returncode == 0, cut.stderr
    before = {name: steps(root, name) for name in MODULES}
    assert before["top"] < EPOCHS * BATCHES - 100
    goes_on = partial(eventually, "it goes on", lambda: steps(root, "top") > before["top"] + 40)
    with pytest.raises(AssertionError, match="not within"):  # in the meantime all wait
        goes_on(within_s=CUT_S - 3)
    goes_on(within_s=BACK_S + 3)
    figures = finished(dnictl, root)
    assert figures["attempt"] == 1
    assert [one["restarts"] for one in figures["modules"]] == [0, 0, 0]
    assert not events(root, "worker_restarting", "worker_warning")
    assert len(events(root, "worker_started")) == len(MODULES)
    assert len(events(root, "worker_ended")) == len(MODULES)


def test_a_job_is_told_to_end_twice(dnictl: Dnictl, slurm: str) -> None:
    """What Slurm does before a time limit: the job takes a checkpoint and requeues itself."""
    root, job = begin(dnictl, slurm)
    for attempt in (1, 2):
        eventually("it trains", lambda attempt=attempt: training(root, attempt))
        assert run(["scancel", "--batch", "--signal=TERM", job]).returncode == 0
        started_again(job)
    figures = finished(dnictl, root)
    assert (figures["attempt"], figures["job"]) == (3, job)
    ends = [one["state"] for one in events(root, "run_ended")]
    assert ends == ["stopped", "stopped", "finished"]
    assert dnictl.run("events").stdout.count("SIGTERM received") == 2
    log = root.supervisor_log.read_text()
    assert re.findall(r"requeueing job \d+ \(start (\d) of at most 11\)", log) == ["1", "2"]
    for attempt in (2, 3):  # one cut for all
        cuts = [re.findall(r"resumes at (\d+) of", root.log(one, attempt).read_text())
                for one in MODULES]  # fmt: skip
        assert cuts[0][0] != "0"
        assert cuts == [cuts[0]] * 3
