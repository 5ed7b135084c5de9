"""Nodes that fail under a run: the testbed's hosts are lost or cut off in mid-run.

Slurm gives a silent node up after a while (``SlurmdTimeout``, 30 s in the testbed); two of
the tests wait for that, in the others somebody tells it that the node is down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.files import read_json
from dni_runtime.run.rundir import RunDir
from tests.e2e.conftest import FOREVER, PAUSE, PAUSES, Dnictl, run
from tests.e2e.test_slurm import ROOT, eventually, is_requeued, started_again, submitted
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(500)]

CHAIN = """\
name: digits
seed: 3
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: {epochs}
stop_grace_s: 10
links: {{interface: {network}, on_loss: wait}}
defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
placement: {{strategy: explicit, map: {{bottom: 0, middle: 1, top: 2}}}}
modules:
  - name: bottom
    resources: {{cpus: {cpus}, memory: {memory}}}
    layers:
      - Linear: {{in_features: 64, out_features: 64}}
      - ReLU
      - {pause}
  - name: middle
    layers:
      - Linear: {{in_features: 64, out_features: 64}}
      - ReLU
  - name: top
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""
EPOCHS = 12  # of 8 s in all: it is still training when a host is lost
BATCHES = 23  # of an epoch
ROOMY = {"cpus": 2, "memory": "1600M"}  # each node gets what 'bottom' needs: two of the others
TIGHT = {"cpus": 1, "memory": "800M"}


def fault(*arguments: str) -> None:
    """Have something done to a host; root does it for us."""
    folder = str(Path(os.environ["SLURM_CONF"]).parent)
    done = run([str(ROOT / "scripts" / "slurm-testbed"), *arguments, "--dir", folder])
    assert done.returncode == 0, done.stderr


def all_idle() -> bool:
    shown = run(["sinfo", "--noheader", "--Node", "--format=%T"])
    return set(shown.stdout.split()) == {"idle"}


@pytest.fixture(autouse=True)
def healed(slurm: str, dnictl: Dnictl) -> Iterator[None]:
    """Every host is there again after a test, and its run has ended."""
    yield
    for number in "123":
        fault("heal", number)
    for record in dnictl.folder.glob("runs/*/job.json"):
        job = (read_json(record) or {}).get("job")
        run(["scancel", "--quiet", str(job)])
    eventually("all hosts are idle", all_idle)


def started(dnictl: Dnictl, slurm: str, resources: dict[str, Any]) -> RunDir:
    (dnictl.folder / "pause.py").write_text(PAUSE)
    text = CHAIN.format(network=slurm, epochs=EPOCHS, pause=PAUSES, **resources)
    (dnictl.folder / "chain.yaml").write_text(text)
    root, _ = submitted(dnictl)
    eventually("it trains", lambda: (read_json(root.worker("top")) or {}).get("step"))
    return root


def started_anew(job: str, host: str) -> None:
    """A requeued job starts on all hosts; one of them was lost."""
    fault("heal", host)
    eventually("all hosts are idle", all_idle)
    started_again(job)


def events(root: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(root.events) if event["event"] == name]


def check_counts(root: RunDir) -> None:
    """Each module has acknowledged every batch of every epoch exactly once."""
    for name in ("bottom", "middle", "top"):
        lines = [line for line in read_lines(root.metrics(name)) if line["kind"] == "epoch"]
        counted = {line["epoch"]: line["batches"] for line in lines}
        assert counted == dict.fromkeys(range(1, EPOCHS + 1), BATCHES), name
        report = read_json(root.worker(name))
        assert report is not None
        assert report["step"] == EPOCHS * BATCHES


def check_moved(dnictl: Dnictl, root: RunDir) -> None:
    dnictl.run("wait", timeout_s=300)
    (lost,) = events(root, "node_lost")
    assert (lost["node"], lost["modules"]) == ("n2", ["middle"])
    (moved,) = events(root, "worker_moved")
    assert (moved["module"], moved["from"], moved["to"]) == ("middle", "n2", "n3")
    again = [(event["module"], event["attempt"]) for event in events(root, "worker_restarting")]
    assert again == [("middle", 2)]
    figures = dnictl.json("status")
    assert (figures["state"], figures["attempt"]) == ("finished", 1)
    assert [module["host"] for module in figures["modules"]] == ["n1", "n3", "n3"]
    heard = root.log("middle", 2).read_text()
    assert re.search(r"listening on tcp://10\.77\.0\.3:\d+, encrypted", heard)
    check_counts(root)
    assert "node_lost" in dnictl.run("events").stdout


def test_a_module_goes_on_elsewhere_when_its_host_is_lost(dnictl: Dnictl, slurm: str) -> None:
    root = started(dnictl, slurm, ROOMY)
    fault("lose", "2")
    eventually("its module runs elsewhere", lambda: events(root, "worker_moved"))
    check_moved(dnictl, root)


def test_one_that_was_only_cut_off_stays_away(dnictl: Dnictl, slurm: str) -> None:
    """The worker that was given up lives, and sees the run directory: it leaves by itself."""
    root = started(dnictl, slurm, ROOMY)
    given_up = Path(f"/proc/{(read_json(root.worker('middle')) or {})['pid']}")
    assert given_up.exists()
    fault("cut", "2", "150")
    eventually("its module is started elsewhere", lambda: events(root, "worker_moved"))
    assert given_up.exists()
    eventually("it leaves, while nobody can reach it", lambda: not given_up.exists())
    fault("heal", "2")
    check_moved(dnictl, root)


def test_without_room_the_job_is_requeued(dnictl: Dnictl, slurm: str) -> None:
    root = started(dnictl, slurm, TIGHT)
    job = (read_json(root.job) or {})["job"]
    fault("lose", "2")
    fault("report", "2")
    eventually("the job is requeued", lambda: is_requeued(job))
    stopped = read_json(root.state) or {}
    assert (stopped["phase"], stopped["exit_code"]) == ("stopped", 75)
    assert stopped["error"] == "node n2 lost: no room for middle elsewhere"
    assert not events(root, "worker_moved")
    started_anew(job, "2")
    dnictl.run("wait", timeout_s=300)
    assert dnictl.json("status")["attempt"] == 2
    assert (read_json(root.worker("top")) or {})["step"] == EPOCHS * BATCHES


def test_when_the_first_host_is_lost_the_job_starts_anew(dnictl: Dnictl, slurm: str) -> None:
    """The supervisor is gone with it: the others requeue the job."""
    root = started(dnictl, slurm, ROOMY)
    job = (read_json(root.job) or {})["job"]
    fault("lose", "1")
    fault("report", "1")
    eventually("the job is requeued", lambda: is_requeued(job), within_s=150)
    started_anew(job, "1")
    dnictl.run("wait", timeout_s=300)
    figures = dnictl.json("status")
    assert (figures["state"], figures["attempt"]) == ("finished", 2)
    assert figures["step"] == EPOCHS * BATCHES


SHRINKS = """\
name: shrinks
data: {{dataset: digits, batch_size: 32, flatten: true}}
epochs: {epochs}
stop_grace_s: 10
links: {{interface: {network}}}
defaults: {{interface: mixed, optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
placement: {{strategy: explicit, map: {{stem: 0, wide.1: 1, wide.2: 1, wide.3: 2, top: 0}}}}
modules:
  - name: stem
    layers: [{{Linear: {{in_features: 64, out_features: 64}}}}, ReLU, {pause}]
  - name: wide
    replicas: 3
    layers: [{{Linear: {{in_features: 64, out_features: 64}}}}, ReLU]
  - name: top
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""


def test_a_job_that_shrinks_and_grows(dnictl: Dnictl, slurm: str) -> None:
    """A node is given back, and comes again, by the page's commands: two starts at a checkpoint."""
    page = (ROOT / "docs" / "slurm.md").read_text().split("\n## A job that shrinks or grows\n")[1]
    gives_back, asks, takes = re.findall(r"^(s(?:alloc|control) .*?) *#", page, re.M)[:3]
    (dnictl.folder / "pause.py").write_text(PAUSE)
    text = SHRINKS.format(network=slurm, epochs=FOREVER, pause=PAUSES)
    (dnictl.folder / "chain.yaml").write_text(text)
    root, job = submitted(dnictl)

    def step() -> int:
        return (read_json(root.worker("top")) or {}).get("step", 0)

    eventually("it trains", lambda: step() > 0)
    done = run(gives_back.replace("=JOB", f"={job}").split())
    assert done.returncode == 0, done.stderr
    eventually("the run goes on without a replica", lambda: events(root, "replica_lost"))
    then = step()
    eventually("training goes on", lambda: step() > then + 20)
    dnictl.run("scale", "wide=3")
    eventually("there is no room for it", lambda: events(root, "no_room"))
    assert [event["node"] for event in events(root, "node_lost")] == ["n3"]
    done = run(asks.replace(":JOB", f":{job}").split())
    granted = re.search(r"Granted job allocation (\d+)", done.stderr)
    assert granted, done.stderr
    done = run(takes.replace("=NEW", f"={granted[1]}").split())
    assert done.returncode == 0, done.stderr
    eventually("it comes again", lambda: len(events(root, "scaled")) == 2)
    then = step()
    eventually("training goes on", lambda: step() > then + 20)
    assert dnictl.json("stop")["state"] == "stopped"
    figures = dnictl.json("status")
    assert [module["host"] for module in figures["modules"][:4]] == ["n1", "n2", "n2", "n3"]
    assert [module["restarts"] for module in figures["modules"]] == [2, 2, 2, 1, 2]
