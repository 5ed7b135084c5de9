"""Workers that Open MPI's ``mpirun``, or ``srun``, starts: each finds its module by its rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.image.apptainer import Apptainer
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.metrics import EvaluationLine, read_metrics
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.checkpoint import read
from tests.e2e.conftest import FOREVER, Dnictl, Site, eventually, need, processes_of
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
CHAIN = """\
name: digits
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: {epochs}
stop_grace_s: 20
{links}
image: {{torch: "torch=={torch}"}}
defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}}}
modules:
  - name: bottom
    replicas: {ends}
    layers: [{{Linear: {{in_features: 64, out_features: 64}}}}, {{BatchNorm1d: {{num_features: 64}}}}, ReLU]
  - name: middle
    replicas: 2
    layers: [{{Linear: {{in_features: 64, out_features: 64}}}}, {{BatchNorm1d: {{num_features: 64}}}}, ReLU]
  - name: top
    replicas: {ends}
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""  # noqa: E501
ENDS = re.sub(r"  - name: middle\n.*\n.*\n", "", CHAIN)
"""The chain without its module in the middle."""
WORKERS = [f"{module}.{one}" for module in ("bottom", "top") for one in (1, 2)]


BOUND = "setpriv --pdeathsig TERM"


@pytest.fixture
def mpirun(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Open MPI as ``mpirun``, whichever MPI is the machine's default; on any number of cores.

    It ends with what has started it, also if that is killed.
    """
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {BOUND} {need("mpirun.openmpi")} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    return str(folder / "mpirun")


def write(folder: Path, epochs: int, links: str = "", *, ends: int = 1) -> Path:
    """A chain of three modules, of which the one in the middle is there twice; or both ends are."""
    path = folder / "chain.yaml"
    torch = version("torch").split("+")[0]
    chain = CHAIN if ends == 1 else ENDS
    path.write_text(chain.format(epochs=epochs, links=links, torch=torch, ends=ends))
    return path


def block(heading: str, number: int = 0) -> str:
    """A script in a section of docs/mpi.md."""
    page = (ROOT / "docs" / "mpi.md").read_text()
    section = page.split(f"\n## {heading}\n")[1] if heading else page
    return re.findall(r"```sh\n(.*?)```", section.split("\n## ")[0], re.DOTALL)[number]


def sh(folder: Path, script: str, *, expect: int = 0) -> str:
    """Run a script; its output."""
    done = subprocess.run(
        [*BOUND.split(), "bash", "-euc", script], cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == expect, f"{script}: {done.returncode}\n{done.stdout}"
    return done.stdout


def test_a_test_that_is_killed_leaves_no_mpirun(mpirun: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"  # in the command line of all that is started
    sleeps = f"import time; open('{mark}', 'w'); time.sleep(300)"
    script = f'mpirun -n 1 {sys.executable} -c "{sleeps}"; true'
    argv = [*BOUND.split(), "bash", "-euc", script]
    code = f"import subprocess; subprocess.run({argv!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as killed:
        eventually("mpirun runs", mark.exists, 60)
        assert processes_of(mark)
        killed.kill()
    eventually("nothing of it runs", lambda: not processes_of(mark), 30)


@pytest.fixture
def launched(site: Site, mpirun: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Launchers that a test has started; ended if they still run."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.terminate()  # it ends its ranks
        process.wait(30)


def launch(site: Site, started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start the command that ``dnictl mpi`` has printed, and wait until all workers train."""
    before = reports(site.latest)
    argv = (site.folder / "train.sh").read_text()
    with (site.folder / "out.txt").open("ab") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {argv}"], cwd=site.folder, stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    started.append(process)

    def all_train() -> bool:
        assert process.poll() is None, (site.folder / "out.txt").read_text()
        return all(
            new.attempt == before[name].attempt + 1
            and new.state == "running"
            and (new.step or 0) > (before[name].step or 0) + 5
            for name, new in reports(site.latest).items()
        )

    eventually("all workers train", all_train, 120)
    return process


def reports(run: RunDir) -> dict[str, Report]:
    """The newest report of each worker."""
    return {name: Report.read(run.worker(name)) for name in WORKERS}


def states(site: Site) -> dict[str, Any]:
    """The state of the run and of its workers."""
    figures = site.json("status")
    return {"run": figures["state"], **{m["module"]: m["state"] for m in figures["modules"]}}


def test_a_run_is_stopped_killed_and_continued(
    site: Site, launched: list[subprocess.Popen[bytes]]
) -> None:
    chain = write(site.folder, FOREVER, ends=2)
    printed = site.run("mpi", chain, "--backend", "process").stdout
    assert printed.startswith("mpirun -n 4 ")
    (site.folder / "train.sh").write_text(printed)
    assert states(site)["run"] == "new"

    process = launch(site, launched)
    assert states(site) == dict.fromkeys(["run", *WORKERS], "running")
    assert "no supervisor" in site.run("restart", "top.1", expect=64).stderr
    assert site.json("stop")["state"] == "stopped"
    assert process.wait(30) == 75
    assert states(site) == dict.fromkeys(["run", *WORKERS], "stopped")
    stopped_at = site.cuts(WORKERS)[-1]  # mpirun has waited for all parts of it
    assert site.run("resume", expect=64).stderr.endswith(printed)

    process = launch(site, launched)
    for name in WORKERS:
        log = site.latest.log(name, 2).read_text()
        assert f"module {name} resumes at {stopped_at} of the stream" in log
    victim = reports(site.latest)["bottom.2"].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert process.wait(60) not in (0, 75)
    eventually("the ranks have ended", lambda: states(site)["run"] != "stopping")
    figures = site.json("status")
    assert figures["state"] == "lost"
    assert "bottom.2" in figures["error"]

    process = launch(site, launched)
    assert states(site)["run"] == "running"
    site.run("stop")
    assert process.wait(30) == 75
    assert not site.latest.endpoint("top.1").exists()
    evaluations = read_metrics(site.latest.metrics("top.1"), EvaluationLine)
    assert {one.samples for one in evaluations} == {360}, "of both replicas' batches, each time"


def test_another_number_of_processes_is_refused(site: Site, mpirun: str) -> None:
    printed = site.run("mpi", write(site.folder, 1), "--backend", "process").stdout
    said = sh(site.folder, printed.replace("mpirun -n 4", "mpirun -n 2"), expect=64)
    assert re.search(r"process [01] \(OMPI_COMM_WORLD_RANK\) of 2 .* has 4 workers", said)
    said = sh(site.folder, printed.removeprefix("mpirun -n 4 "), expect=64)
    assert "this process has no rank" in said


@pytest.mark.slurm
@pytest.mark.apptainer
def test_the_page_in_a_slurm_job(tool: Apptainer, slurm: str, tmp_path: Path) -> None:
    """Its script for Slurm: four ranks on two hosts, whose links are encrypted.

    The two replicas, one on each, form a process group, which is not.
    """
    train_in_a_job("none", {"n1", "n2"}, slurm, tmp_path)


def train_in_a_job(kind: str, hosts: set[str], slurm: str, tmp_path: Path) -> None:
    write(tmp_path, 6, f"links: {{interface: {slurm}}}\nreplication: {{backend: gloo}}")
    dnictl = Dnictl(tmp_path)
    dnictl.run("build")
    printed = dnictl.run("mpi", "--run-dir", "runs/a")
    assert printed.stdout.rstrip().endswith("--transport tcp --start $(date +%s)")
    assert "'replication.backend: gloo': anyone who can reach" in printed.stderr
    script = block("Several hosts").replace("--mpi=none", f"--mpi={kind}")
    (tmp_path / "job.sh").write_text(script.replace("--nodes=2", f"--nodes={len(hosts)}"))
    done = subprocess.run(
        ["sbatch", "--wait", "--output=out.txt", "job.sh"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "SLURM_DISTRIBUTION": "cyclic"},  # replicas: one on each host
    )  # fmt: skip
    said = (tmp_path / "out.txt").read_text() if (tmp_path / "out.txt").exists() else ""
    assert done.returncode == 0, done.stderr + said
    figures = dnictl.json("status")
    assert (figures["state"], figures["epoch"]) == ("finished", 6)
    assert {module["host"] for module in figures["modules"]} == hosts
    run = RunDir(tmp_path / "runs" / "a")
    evals = [line for line in read_lines(run.metrics("top")) if line["kind"] == "eval"]
    assert evals[-1]["accuracy"] > 0.85
    listens = r"listening on tcp://10\.77\.0\.\d:\d+, encrypted"
    assert re.search(listens, run.log("top", 1).read_text())
    replicas = {json.loads(run.worker(f"middle.{one}").read_text())["host"] for one in (1, 2)}
    assert replicas == hosts
    (group,) = run.group("middle").iterdir()
    assert len(list(group.glob("host.*"))) == 2
    cut = complete_cuts(run, ["middle.1", "middle.2"])[-1]
    same = [read(run.checkpoint(cut, f"middle.{one}"))[0] for one in (1, 2)]
    assert torch.equal(*(one["layers.0.weight"] for one in same))
    assert not run.keys.exists()
