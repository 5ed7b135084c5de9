"""Chains on a real Slurm of three hosts (scripts/slurm-testbed), as an ordinary user."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from dni_runtime import Run
from dni_runtime.files import read_json
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from tests.e2e import conftest
from tests.e2e.conftest import (
    FOREVER,
    PAUSE,
    PAUSES,
    Dnictl,
    command_of,
    figures_of,
    run,
    state_of,
)
from tests.lines import read_lines

eventually = partial(conftest.eventually, within_s=90)  # Slurm takes its time

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CHAIN = """\
name: digits
seed: 3
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: {epochs}
stop_grace_s: 10
links: {{interface: {network}}}
defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
modules:
{lower}
  - name: top
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""
LOWER = """\
  - name: {name}
    layers:
      - Linear: {{in_features: 64, out_features: 64}}
      - BatchNorm1d: {{num_features: 64}}
      - ReLU
"""


def chain(folder: Path, network: str, epochs: int, lower: tuple[str, ...] = ("bottom",)) -> None:
    layers = "".join(LOWER.format(name=name) for name in lower)
    (folder / "chain.yaml").write_text(CHAIN.format(network=network, epochs=epochs, lower=layers))


def slow_chain(
    folder: Path, network: str, epochs: int, lower: tuple[str, ...] = ("bottom",)
) -> None:
    """A chain whose head takes 30 ms for a batch: it is not over before something happens to it."""
    (folder / "pause.py").write_text(PAUSE)
    chain(folder, network, epochs, lower)
    path = folder / "chain.yaml"
    slow = f"      - ReLU\n      - {PAUSES}\n"
    path.write_text(path.read_text().replace("      - ReLU\n", slow, 1))


def training(root: RunDir, attempt: int = 1) -> bool:
    """Whether a start of a run has trained for an epoch."""
    state, tail = read_json(root.state) or {}, read_json(root.worker("top")) or {}
    assert state.get("phase") != "failed", root.supervisor_log.read_text()
    here = tail.get("attempt") == attempt and tail.get("state") == "running"
    return here and int(tail.get("step") or 0) > 23 * attempt


def is_requeued(job: str) -> bool:
    return state_of(job) == "PENDING"


def started_again(job: str) -> None:
    """A requeued job starts; Slurm would let it wait for two minutes.

    A node ends it at once unless its new credential is of a later second than the job's last end
    there (``slurm_cred_handle_reissue`` in Slurm's slurm_cred.c). A requeued job is PENDING as soon
    as it has ended on all nodes.
    """
    eventually("it is requeued", lambda: is_requeued(job))
    ended_s = int(time.time())
    eventually("a later second", lambda: time.time() >= ended_s + 2)

    def starts() -> bool:  # again and again: Slurm may put it off only after it is PENDING
        if is_requeued(job):
            run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
        return state_of(job) == "RUNNING"

    eventually("it starts", starts, every_s=0.5)


def submitted(dnictl: Dnictl, *options: str) -> tuple[RunDir, str]:
    """The directory and the job of a run that is submitted."""
    said = dnictl.run("submit", "--backend", "process", "--parsable", *options).stdout
    name, _, job = said.strip().partition(";")
    return RunDir(dnictl.folder / "runs" / name), job


def test_three_hosts_train_a_chain(dnictl: Dnictl, slurm: str) -> None:
    chain(dnictl.folder, slurm, 8, ("bottom", "middle", "upper"))
    figures = dnictl.json("submit", "--nodes", "3", "--backend", "process", "--wait")
    assert figures["state"] == "finished"
    assert figures["accuracy"] > 0.9
    assert [module["host"] for module in figures["modules"]] == ["n1", "n2", "n3", "n3"]
    root = RunDir(Path(figures["path"]))
    plan = read_json(root.plan)
    assert plan is not None
    # one node: ipc; across: the bridge's network, by an endpoint that says so
    assert [worker["transport"] for worker in plan["workers"]] == [
        None, "tcp", "tcp", "ipc",
    ]  # fmt: skip
    heard = "".join(root.log(name, 1).read_text() for name in ("middle", "upper", "top"))
    assert re.search(r"middle listens on tcp://10\.77\.0\.2:\d+", heard)
    assert re.search(r"upper listens on tcp://10\.77\.0\.3:\d+", heard)
    assert re.search(r"top listens on ipc:///tmp/dni-", heard)
    assert "epoch 8/8" in dnictl.run("logs", "supervisor").stdout
    assert not Path(plan["sockets"]).exists()


def test_a_waiting_job_says_why_and_can_be_stopped(dnictl: Dnictl, slurm: str) -> None:
    chain(dnictl.folder, slurm, FOREVER)
    blocker = run(
        ["sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 60"]
    ).stdout.strip()
    try:
        _, job = submitted(dnictl, f"--dependency=afterany:{blocker}")
        figures = dnictl.json("status")
        assert (figures["state"], figures["job"]) == ("queued", job)
        assert "Dependency" in figures["error"]
        dnictl.run("wait", "--timeout", "1", expect=124)
        assert "stopped" in dnictl.run("stop").stdout
        assert state_of(job) == ""
    finally:
        run(["scancel", blocker])


def test_stop_resume_and_cancel(dnictl: Dnictl, slurm: str) -> None:
    slow_chain(dnictl.folder, slurm, FOREVER)
    root, first = submitted(dnictl)
    eventually("it trains", lambda: training(root))
    assert "stopped" in dnictl.run("stop").stdout
    assert all(module["state"] == "stopped" for module in dnictl.json("status")["modules"])
    eventually("its job ends without a requeue", lambda: state_of(first) == "")
    dnictl.run("resume", "--log-level", "debug")
    eventually("it trains again", lambda: training(root, 2))
    assert all(worker["log_level"] == "debug" for worker in read_json(root.plan)["workers"])
    second = dnictl.json("status")["job"]
    assert second != first
    run(["scancel", second])
    dnictl.run("wait", expect=75, timeout_s=100)  # a checkpoint here too
    eventually("its job ends without a requeue", lambda: state_of(second) == "")


def test_up_and_serve_inside_an_allocation(dnictl: Dnictl, slurm: str) -> None:
    chain(dnictl.folder, slurm, 2, ("bottom", "middle"))
    python, out = shlex.quote(sys.executable), dnictl.folder / "out.json"
    command = f"""set -e
        dnictl="{python} -m dnictl"
        $dnictl up --name trained --json
        $dnictl export trained -o model.safetensors >&2
        $dnictl serve trained --name answers -d --port 0 --json > service.json
        export PYTHONPATH={shlex.quote(str(ROOT))}
        {python} -m tests.e2e.asking service.json model.safetensors
        $dnictl serve --stop --name answers >&2"""
    done = run(
        ["sbatch", "--wait", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=3", "--mem=3G",
         f"--output={out}", f"--error={dnictl.folder / 'err'}", f"--chdir={dnictl.folder}",
         "--wrap", command]
    )  # fmt: skip
    assert done.returncode == 0, (dnictl.folder / "err").read_text() + out.read_text()
    figures = json.loads(out.read_text())
    assert figures["state"] == "finished"
    assert {module["host"] for module in figures["modules"]} == {"n1", "n2", "n3"}
    served = figures_of(dnictl.folder / "runs" / "answers" / "1")
    assert {module.host for module in served.modules} == {"n1", "n2", "n3"}


def test_an_interface_that_a_node_lacks_is_named(dnictl: Dnictl) -> None:
    chain(dnictl.folder, "10.99.0.0/24", epochs=2)
    done = dnictl.run("submit", "--nodes", "2", "--backend", "process", "--wait", expect=70)
    assert "10.99.0.0/24" in done.stderr
    assert "10.77.0.2" in done.stderr  # what there is
    assert "log:" in done.stderr
    dnictl.run("resume")
    dnictl.run("wait", expect=70, timeout_s=100)  # for the end of the new job
    assert all(module["attempt"] == 2 for module in dnictl.json("status")["modules"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "4"], ["needs 4 nodes", "has 3 such nodes", "8 CPUs"]),
        (["--nodes", "2", "--partition", "gpu"], ["no partition 'gpu'", "main"]),
        (["--nodes", "2", "--time", "soon"], ["--time: 'soon' is not a time limit"]),
    ],
)
def test_the_impossible_is_refused_before_the_queue(
    dnictl: Dnictl, slurm: str, options: list[str], words: list[str]
) -> None:
    chain(dnictl.folder, slurm, 2, ("a", "b", "c", "d"))
    done = dnictl.run("submit", "--backend", "process", *options, expect=64)
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(dnictl.folder.glob("runs/*"))


def test_slurm_accepts_what_would_be_submitted(dnictl: Dnictl, slurm: str) -> None:
    chain(dnictl.folder, slurm, epochs=2)
    said = dnictl.run("submit", "--nodes", "2", "--backend", "process", "--test-only").stdout
    assert "to start at" in said
    assert not (dnictl.folder / "runs").exists()


IMAGES = """\
name: pair
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: 5
links: {{transport: tcp, interface: {network}, security: {security}}}
image: {{torch: "torch=={torch}"}}
defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
modules:
{lower}
  - name: top
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""


def build_images(folder: Path, network: str, security: str) -> None:
    """A chain of two modules, and their images."""
    torch_version = version("torch").split("+")[0]
    lower = LOWER.format(name="bottom")
    text = IMAGES.format(network=network, security=security, torch=torch_version, lower=lower)
    (folder / "chain.yaml").write_text(text)
    Dnictl(folder).run("build")


def kill(folder: Path, module: str) -> None:
    """Kill a module's worker, in its container on whichever host."""
    worker = f"--module\0{module}\0".encode()
    killed = [pid for pid in conftest.processes_of(folder) if worker in command_of(pid)]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert killed


REPLICAS = """\
name: replicas
data: {{dataset: digits, batch_size: 32, flatten: true}}
epochs: 16
stop_grace_s: 10
restart: {{backoff_s: 0.1, snapshot_s: 1}}
links: {{interface: {network}}}
image: {{torch: "torch=={torch}"}}
placement: {{strategy: explicit, map: {{stem: 0, deep.1: 1, deep.2: 2, top: 2}}}}
replication: {{strategy: diloco, every: 10}}
defaults: {{interface: mixed, optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
modules:
  - {{name: stem, replicas: {{start: 1, most: 2}}, layers: [{{Linear: {{in_features: 64, out_features: 64}}}}, {{BatchNorm1d: {{num_features: 64}}}}, ReLU, {pause}]}}
  - {{name: deep, replicas: {{start: 1, most: 2}}, layers: [{{Linear: {{in_features: 64, out_features: 32}}}}, ReLU]}}
  - {{name: top, layers: [{{Linear: {{in_features: 32, out_features: 10}}}}]}}
"""  # noqa: E501


@pytest.mark.apptainer
def test_replicas_in_containers_on_three_hosts(tool: Apptainer, slurm: str, dnictl: Dnictl) -> None:
    """One image for all replicas of a module. Two are added, one is killed; no batch is lost."""
    (dnictl.folder / "pause.py").write_text(PAUSE)
    torch_version = version("torch").split("+")[0]
    text = REPLICAS.format(network=slurm, torch=torch_version, pause=PAUSES)
    (dnictl.folder / "chain.yaml").write_text(text)
    dnictl.run("build")
    assert {path.name for path in (dnictl.folder / "images").glob("*.sif")} == {
        f"{name}.sif" for name in ("stem", "deep", "top")
    }
    said = dnictl.run("submit", "--backend", "apptainer", "--parsable").stdout
    name, _, _ = said.strip().partition(";")
    root = RunDir(dnictl.folder / "runs" / name)
    workers = ["stem.1", "stem.2", "deep.1", "deep.2", "top"]
    eventually("a checkpoint", lambda: complete_cuts(root, workers))
    assert "deep: 2" in dnictl.run("scale", "stem=2", "deep=2").stdout

    def run() -> bool:
        return {one.state for one in RunState.read(root).modules.values()} == {"running"}

    eventually("all run", run)
    assert {one.restarts for one in RunState.read(root).modules.values()} == {1}
    step = Run.open(root.root).status().step or 0
    eventually("training goes on", lambda: (Run.open(root.root).status().step or 0) > step + 20)
    kill(dnictl.folder, "deep.2")
    figures = dnictl.json("wait")
    assert (figures["state"], figures["backend"]) == ("finished", "apptainer")
    assert all(worker.image for worker in LaunchPlan.read(root).workers)
    assert not root.keys.exists()
    found = {one["module"]: one for one in figures["modules"]}
    assert [found[one]["host"] for one in workers] == ["n1", "n1", "n2", "n3", "n3"]
    assert {name for name, one in found.items() if one["restarts"] > 1} == {"deep.2"}
    every = 16 * 45
    assert found["stem.1"]["step"] + found["stem.2"]["step"] == found["top"]["step"] == every
    assert found["deep.1"]["step"] + found["deep.2"]["step"] == every
    assert figures["accuracy"] > 0.85
    listens = r"listening on tcp://10\.77\.0\.\d:\d+, encrypted"
    assert re.search(listens, root.log("deep.1", 1).read_text())


@pytest.mark.apptainer
def test_the_page_by_hand(tool: Apptainer, slurm: str, tmp_path: Path) -> None:
    """docs/slurm.md, "By hand", as it stands: two modules, two nodes, srun and apptainer alone."""
    build_images(tmp_path, slurm, "none")
    page = (ROOT / "docs" / "slurm.md").read_text().split("\n## By hand\n")[1].split("\n## ")[0]
    script = re.search(r"```sh\n(#!.*?)```", page, re.DOTALL)
    assert script is not None
    (tmp_path / "by-hand.sh").write_text(script[1])
    done = subprocess.run(
        ["sbatch", "--wait", "--output=out.txt", "by-hand.sh"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    said = (tmp_path / "out.txt").read_text() if (tmp_path / "out.txt").exists() else ""
    assert done.returncode == 0, done.stderr + said
    found = RunDir(tmp_path / "by-hand")
    evals = [line for line in read_lines(found.metrics("top")) if line["kind"] == "eval"]
    assert evals[-1]["epoch"] == 5
    assert evals[-1]["accuracy"] > 0.85
    hosts = {json.loads(found.worker(name).read_text())["host"] for name in ("bottom", "top")}
    assert hosts == {"n1", "n2"}
