"""A chain in real Apptainer containers: by ``dnictl up``, and wired by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from dni_runtime import load
from dni_runtime.data import open_data
from dni_runtime.files import WORKER_FOLDERS
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import load_chain
from tests.e2e.asking import compare
from tests.e2e.conftest import Dnictl, Site, eventually, processes_of
from tests.lines import read_lines

pytestmark = [pytest.mark.apptainer, pytest.mark.e2e, pytest.mark.timeout(900)]

TORCH = version("torch").split("+")[0]
CHAIN = f"""\
name: contained
data: {{dataset: digits, batch_size: 64}}
epochs: 12
defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}}}
image: {{torch: "torch=={TORCH}"}}
modules:
  - name: bottom
    layers: [Flatten, {{import: "mine:Block", args: {{inputs: 64, outputs: 64}}}}]
  - name: top
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""
BLOCK = """\
from torch import nn

class Block(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())
"""
PROBE = """\
import json, os, time
from pathlib import Path

SEEN = Path("/dni/run")

def tried(paths, attempt):
    done = []
    for path in paths:
        try:
            if attempt(path):
                done.append(str(path))
        except OSError:
            pass
    return done

def probe():
    if not SEEN.is_dir():
        return
    outside = json.loads(os.environ["PROBED"])
    files = [Path(folder, name) for root in (SEEN, outside) for folder, _, names in os.walk(root)
             for name in names]
    keys = [Path(root, "keys", f"{name}.key") for root in (SEEN, outside)
            for name in ("bottom", "top")]
    others = [path for pid in Path("/proc").glob("[0-9]*") for path in
              (pid / "root" / f"{outside}/keys/top.key", pid / "cwd" / "keys/top.key")]
    control = ["job.sbatch", "job.json", "chain.json", "chain.yaml", "plan.json", "run.json",
               "state.json", "stop.json", "specs/bottom.json", "specs/top.json", "specs/new.json",
               "src/mine.py", "keys/new.pub", "keys/top.pub", "requests/restart-top", "logs/x.log",
               "initial/top.safetensors"]
    control = [Path(root, name) for root in (SEEN, outside) for name in control]
    found = {
        "files": tried(files, lambda path: path.read_bytes()),
        "keys": tried([*keys, *others], lambda path: path.read_bytes()),
        "written": tried(control, lambda path: path.write_text("x") or True),
        "removed": tried(control, lambda path: path.unlink() or True),
        "replaced": tried(control, lambda path: os.replace(__file__, path) or True),
    }
    (SEEN / "metrics" / f"probe-{os.getpid()}.txt").write_text(json.dumps(found))

probe()

class Block(Block):
    def forward(self, x):
        time.sleep(0.02)  # leaves the processors to what starts
        return super().forward(x)
"""


def dnictl(folder: Path, *arguments: str) -> str:
    return Dnictl(folder).run(*arguments).stdout


@pytest.fixture(scope="module")
def site(tool: Apptainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chain, a user's layer and its images."""
    folder = tmp_path_factory.mktemp("site with space")
    (folder / "chain.yaml").write_text(CHAIN)
    (folder / "mine.py").write_text(BLOCK)
    dnictl(folder, "build")
    return folder


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_up_trains_in_containers_which_then_answer(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = json.loads(dnictl(site, "up", "--backend", "apptainer", "--json"))
    assert summary["state"] == "finished"
    assert summary["accuracy"] > 0.9
    plan = json.loads((Path(summary["path"]) / "plan.json").read_text())
    assert all(worker["image"] for worker in plan["workers"])
    dnictl(site, "export", "-o", "model.safetensors")
    monkeypatch.syspath_prepend(str(site))
    model = load(site / "model.safetensors", trust=True)
    chain = load_chain(site / "chain.yaml")
    with torch.no_grad():
        pairs = [
            ((model(x).argmax(1) == y).sum(), len(y))
            for x, y in open_data(chain.data, site, seed=0).eval_batches()
        ]
    accuracy = float(sum(int(right) for right, _ in pairs) / sum(n for _, n in pairs))
    assert accuracy == pytest.approx(summary["accuracy"], abs=1e-6)

    service = ["serve", "--name", "answers"]
    containers = ["--backend", "apptainer", "--trust", "-d", "--port", "0", "--json"]
    url = json.loads(dnictl(site, *service, *containers))["url"]
    try:
        compare(url, "answers", site / "model.safetensors")
        plan = json.loads((site / "runs" / "answers" / "1" / "plan.json").read_text())
        assert all(worker["image"] for worker in plan["workers"])
    finally:
        dnictl(site, *service, "--stop")


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that containers do not see, unlike those in /tmp."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        yield Path(name)


def test_containers_see_only_what_they_need(
    tool: Apptainer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that looks for others' keys and for what a start goes by, in a run that goes on.

    Encrypted links, so that there are keys: inside, the same user sees them with the same modes.
    """
    (home / "mine.py").write_text(BLOCK + PROBE)
    text = CHAIN.replace("modules:", "links: {transport: tcp, security: curve}\nmodules:")
    text = text.replace("epochs: 12", "epochs: 100000\ncheckpoint: {every_steps: 20}")
    (home / "chain.yaml").write_text(text)
    run = RunDir(home / "run")
    monkeypatch.setenv("PROBED", json.dumps(str(run.root)))
    here = Site(home)
    modules = ["bottom", "top"]
    try:
        here.run("build")
        here.run("up", "--backend", "apptainer", "--run-dir", run.root, "-d")
        run.script.write_text("#!/bin/sh\n")  # as 'dnictl submit' leaves one
        eventually("a checkpoint", lambda: complete_cuts(run, modules), 100)
        before = {path: path.read_bytes() for path in (run.script, run.chain, run.spec("top"))}
        here.run("restart", "bottom", run.root)
        eventually("bottom is restarted", lambda: run.log("bottom", 2).exists())
        cut = complete_cuts(run, modules)[-1]
        eventually("a later checkpoint", lambda: complete_cuts(run, modules)[-1] > cut, 100)
        here.run("stop", run.root)
        assert "encrypted" in run.log("top", 1).read_text()
    finally:
        for process in processes_of(run.root):
            os.kill(process, signal.SIGKILL)
    assert not run.keys.exists()
    probes = [json.loads(path.read_text()) for path in run.root.glob("metrics/probe-*.txt")]
    assert len(probes) == 2  # bottom's starts
    for probe in probes:
        assert probe.pop("keys") == ["/dni/run/keys/bottom.key"]
        files = {Path(path).relative_to("/dni/run") for path in probe.pop("files")}
        alone = {path for path in files if path.parts[0] not in WORKER_FOLDERS}
        assert {*map(str, alone)} == {
            "run.json", "state.json", "specs/bottom.json",
            "keys/bottom.key", "keys/bottom.pub", "keys/top.pub",
            "control/bottom.json", "control/top.json",
        }  # fmt: skip
        assert probe == {"written": [], "removed": [], "replaced": []}
    assert {path: path.read_bytes() for path in before} == before


def test_images_of_another_spec_are_refused(site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCK)
    (tmp_path / "chain.yaml").write_text(CHAIN.replace("lr: 0.002", "lr: 0.004"))
    up = ["up", "--backend", "apptainer", "--images", site / "images"]
    assert "dnictl build" in Dnictl(tmp_path).run(*up, expect=65).stderr
    assert not (tmp_path / "runs").exists()


def test_two_images_wired_by_hand(
    site: Path, tmp_path: Path, tool: Apptainer, processes: list[subprocess.Popen[bytes]]
) -> None:
    """docs/images.md, "By hand": nothing but ``apptainer run``; stopped, and restarted."""
    run = RunDir(tmp_path)
    run.create()

    def start(name: str) -> None:
        with (tmp_path / f"{name}.log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    [
                        tool.path,
                        "run",
                        "--mount",
                        f"type=bind,src={tmp_path},dst=/dni/run",
                        site / "images" / f"{name}.sif",
                        "--ipc",
                        "/dni/run",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def logs() -> str:
        return "".join((tmp_path / f"{name}.log").read_text() for name in ("top", "bottom"))

    for name in ("top", "bottom"):
        start(name)
    deadline = time.monotonic() + 120
    while not list(read_lines(run.metrics("top"))):
        assert time.monotonic() < deadline, logs()
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes = [process.wait(60) for process in processes]
    if codes == [0, 0]:
        pytest.fail("the chain was too short to be stopped: " + logs())
    assert codes == [75, 75], logs()
    assert complete_cuts(run, ["top", "bottom"])
    processes.clear()
    for name in ("top", "bottom"):
        start(name)
    assert [process.wait(120) for process in processes] == [0, 0], logs()
    evals = [line for line in read_lines(run.metrics("top")) if line["kind"] == "eval"]
    assert evals[-1]["epoch"] == 12
    assert evals[-1]["accuracy"] > 0.9
