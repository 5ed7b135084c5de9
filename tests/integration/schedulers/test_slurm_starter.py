"""Steps of a job: who is told what, with how many questions; Slurm's programs are made up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dni_runtime.plan.plan import Need, WorkerPlan
from dni_runtime.schedulers.processes import Process
from dni_runtime.schedulers.slurm.steps import SlurmStarter
from tests.conftest import eventually

STEPS = "echo '7.0|bottom'; echo '7.1|middle'"
SILENT = "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1"
GONE = "echo 'slurm_load_job_steps error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, of which ``scancel`` tells nobody, and ``srun`` waits."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    program(folder, "squeue", STEPS)
    program(folder, "scancel", "")
    program(folder, "srun", "exec sleep 60")
    return folder


def program(bin: Path, name: str, script: str) -> None:
    """Make up a program, which notes its arguments."""
    note = f'echo "{name} $*" >>{bin.parent}/asked\n'
    (bin / name).write_text(f"#!/bin/sh\n{note}{script}\n")
    (bin / name).chmod(0o755)


def asked(bin: Path) -> list[str]:
    """What Slurm's programs were asked since the last call."""
    notes = bin.parent / "asked"
    lines = [line for line in notes.read_text().splitlines() if not line.startswith("srun")]
    notes.write_text("")
    return lines


def ended(process: Process) -> int:
    eventually("it ends", lambda: process.poll() is not None, 30, every_s=0.01)
    code = process.poll()
    assert code is not None
    return code


@pytest.fixture
def starter(bin: Path) -> SlurmStarter:
    return SlurmStarter("7")


@pytest.fixture
def workers(bin: Path, starter: SlurmStarter, tmp_path: Path) -> Iterator[dict[str, Process]]:
    """Three workers; the step of ``top`` has not begun."""
    found: dict[str, Process] = {}
    for name in ("bottom", "middle", "top"):
        log = str(tmp_path / f"{name}.log")
        worker = WorkerPlan("", name, log=log, node="n1", need=Need(name))
        found[name] = starter.start(worker)
    notes = tmp_path / "asked"

    def started() -> bool:
        return notes.exists() and notes.read_text().count("srun") == 3

    eventually("srun starts", started, 30, every_s=0.01)
    yield found
    for process in found.values():
        process.kill()
        ended(process)


def test_steps_are_killed_at_once(
    bin: Path, starter: SlurmStarter, workers: dict[str, Process]
) -> None:
    starter.kill_all(workers)
    _, scancel = asked(bin)
    assert scancel == "scancel --signal=KILL 7.0 7.1"
    assert [ended(process) for process in workers.values()] == [-signal.SIGKILL] * 3


def test_a_step_ends_with_its_srun(bin: Path, workers: dict[str, Process]) -> None:
    """Killed alone, srun leaves its step: it holds what a restart of the module needs."""
    program(
        bin,
        "scancel",
        f"printf '#!/bin/sh\\necho asked again >>{bin.parent}/asked' >'{bin}/squeue'",
    )
    os.kill(workers["middle"].pid, signal.SIGKILL)
    assert ended(workers["middle"]) == workers["middle"].poll() == -signal.SIGKILL
    squeue, scancel, again = asked(bin)
    assert squeue.startswith("squeue --steps --noheader --jobs=7 ")
    assert (scancel, again) == ("scancel --signal=KILL 7.1", "asked again")
    assert workers["bottom"].poll() is None


def test_a_job_that_is_gone_has_no_steps(
    bin: Path, starter: SlurmStarter, workers: dict[str, Process]
) -> None:
    program(bin, "squeue", GONE)
    starter.kill_all(workers)
    assert len(asked(bin)) == 1
    assert [ended(process) for process in workers.values()] == [-signal.SIGKILL] * 3


SCANCEL = "echo 'scancel: error: Kill job error on job id 7.0: {says}' >&2; exit 1"


@pytest.mark.parametrize(
    ("name", "script", "said"),
    [
        ("scancel", SCANCEL.format(says="Job/step already completing or completed"), ""),
        ("scancel", SCANCEL.format(says="Unable to contact slurm"), "Unable to contact slurm"),
        ("squeue", SILENT, "squeue failed: error: Unable to contact"),
    ],
)
def test_where_slurm_does_not_kill(
    bin: Path,
    starter: SlurmStarter,
    workers: dict[str, Process],
    caplog: pytest.LogCaptureFixture,
    name: str,
    script: str,
    said: str,
) -> None:
    program(bin, name, script)
    starter.kill_all(workers)
    assert ("the steps of bottom, middle, top were not killed" in caplog.text) is bool(said)
    assert said in caplog.text
    assert [ended(process) for process in workers.values()] == [-signal.SIGKILL] * 3


def test_a_module_whose_step_has_gone(bin: Path, starter: SlurmStarter) -> None:
    """Where Slurm does not answer, nothing is known to have gone."""
    assert starter.gone(["bottom", "top"]) == ["top"]
    program(bin, "squeue", SILENT)
    assert not starter.gone(["bottom", "top"])
