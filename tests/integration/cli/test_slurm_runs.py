"""Commands on runs of Slurm and within its jobs; Slurm's programs are made up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dni_runtime.files import append_line, read_json, write_json
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.record import Record
from tests.unit.cli.conftest import Dnictl, WriteChain, ended

Program = Callable[[str, str], None]

WAITS = """\
if [ "$(cat answers)" -gt 0 ]; then echo "7|PENDING|BeginTime|"; fi
echo $(($(cat answers) - 1)) >answers
"""


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Make up one of Slurm's programs, from the text of a shell script."""
    bin = folder / "bin"
    bin.mkdir()
    monkeypatch.setenv("PATH", str(bin), prepend=os.pathsep)

    def write(name: str, script: str) -> None:
        (bin / name).write_text(f"#!/bin/sh\n{script}")
        (bin / name).chmod(0o755)

    return write


def test_a_run_between_two_starts_of_its_job(
    dnictl: Dnictl, record: Record, folder: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on: ``restart`` says that it waits, and ``--follow`` waits for its end."""
    ended(record, "stopped", 75)
    JobRecord(job="7", nodes=(0, 0)).write(record.run.job)
    program("squeue", WAITS)
    program("sacct", "")
    answers = folder / "answers"

    answers.write_text("1\n")
    result = dnictl("restart", "top")
    assert result.code == 64
    assert "'small-1' is queued" in result.err
    assert "dnictl status" in result.err

    monkeypatch.setattr("dnictl.tensorboard._POLL_S", 0.0)
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr("dni_runtime.api.run.time", clock)
    answers.write_text("2\n")
    assert dnictl("tensorboard", "--follow").code == 0
    assert int(answers.read_text()) < 0


@pytest.mark.parametrize("command", [["wait"], ["logs", "-f"], ["events", "-f"]])
def test_whoever_follows_a_job_that_waits_asks_slurm_seldom(
    dnictl: Dnictl,
    record: Record,
    folder: Path,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    ended(record, "stopped", 75)
    JobRecord(job="7", nodes=(0, 0)).write(record.run.job)
    program("squeue", WAITS)
    program("sacct", "")
    (folder / "answers").write_text("2\n")
    slept: list[float] = []
    monkeypatch.setattr(
        "dni_runtime.api.run.time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    )
    dnictl(*command)
    assert slept == [5.0, 5.0]


def test_a_job_whose_supervisor_is_silent_is_not_submitted_again(
    dnictl: Dnictl, record: Record, program: Program
) -> None:
    """Its job runs: two of them would train in one run directory."""
    ended(record, "running", 0, host="elsewhere")
    document = read_json(record.run.state) or {}
    write_json(record.run.state, document | {"updated": time.time() - 500})
    os.utime(record.run.state, (0, 0))
    for name in record.modules:
        report = {"attempt": 1, "state": "running", "time": time.time()}
        write_json(record.run.worker(name), report)
    JobRecord(job="7", nodes=(0, 0)).write(record.run.job)
    record.run.script.write_text("#!/bin/bash\n")
    program("squeue", "echo '7|RUNNING|None|n1'\n")
    program("sbatch", "echo 8\n")
    assert dnictl("status", "--json").json["state"] == "unsupervised"
    result = dnictl("resume")
    assert result.code == 64
    assert "is unsupervised" in result.err
    assert "dnictl stop" in result.err


def test_ps_asks_slurm_once_for_all_runs(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path, program: Program
) -> None:
    prepared = prepare(write_chain())
    for job in "12345":
        run = create_run(folder / "runs" / f"small-{job}", prepared, backend="process")
        JobRecord(job=job, nodes=(0, 0)).write(run.job)
    ended(Record.read(folder / "runs" / "small-5"), "finished", 0)
    program("squeue", "echo $0 $@ >>asked\necho '1|PENDING|Priority|'\necho '2|RUNNING|None|n1'\n")
    program("sacct", "echo $0 $@ >>asked\necho '3|TIMEOUT|TimeLimit|n1'\n")
    states = [row["state"] for row in dnictl("ps", "--json").json]
    assert states == ["queued", "starting", "lost", "lost", "finished"]
    squeue, sacct = (folder / "asked").read_text().splitlines()
    assert "--jobs=1,2,3,4 " in squeue
    assert "--jobs=3,4 " in sacct


def test_dry_runs_print_json_where_asked(
    dnictl: Dnictl,
    write_chain: WriteChain,
    record: Record,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    JobRecord(job="7", nodes=(0, 0)).write(record.run.job)
    record.run.script.write_text("#!/bin/bash\n")
    program("squeue", "echo '7|TIMEOUT|TimeLimit|n1'\n")
    assert dnictl("resume", "--dry-run").out == "#!/bin/bash\n"
    assert dnictl("resume", "--dry-run", "--json").json == {
        "run": "small-1", "path": str(record.run.root), "script": "#!/bin/bash\n",
    }  # fmt: skip

    program("scontrol", "echo n1\necho n2\n")
    program("squeue", "echo '8|RUNNING|None|n[1-2]'\n")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    path = write_chain(("epochs: 2", "epochs: 2\nlinks: {interface: lo}"))
    assert "# n1: bottom\n# n2: top\n" in dnictl("up", path, "--dry-run").out
    document = dnictl("up", path, "--dry-run", "--json").json
    assert [(one["module"], one["node"]) for one in document["workers"]] == [
        ("bottom", "n1"), ("top", "n2"),
    ]  # fmt: skip


def test_a_job_that_is_waited_for_prints_one_line_for_programs(
    dnictl: Dnictl, write_chain: WriteChain, program: Program
) -> None:
    write_chain()
    program("sinfo", "echo 'batch*|1|64|64000|(null)'")
    program("sbatch", "echo 7")
    program("squeue", "")
    program("sacct", "echo '7|CANCELLED|0:0|None|'")
    command = ("submit", "--backend", "process", "--wait")
    result = dnictl(*command, "--parsable", "--name", "a")
    assert result.out == "a;7\n"
    assert "a: lost" in result.err
    assert "b: lost" in dnictl(*command, "--name", "b").out


def test_the_partition_is_checked_that_sbatch_will_use(
    dnictl: Dnictl,
    write_chain: WriteChain,
    folder: Path,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_chain()
    program("sinfo", "echo 'small*|1|1|100|(null)'; echo 'large|1|64|64000|(null)'")
    program("sbatch", 'for one; do echo "$one"; done >asked; echo 7')
    command = ("submit", "--backend", "process", "--parsable", "--name")
    monkeypatch.setenv("SBATCH_PARTITION", "large")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "20")
    assert dnictl(*command, "a").out == "a;7\n"
    assert {"--partition=large", "--time=20"} <= {*(folder / "asked").read_text().split("\n")}
    assert dnictl(*command, "c", "--partition", "large,small").out == "c;7\n"
    result = dnictl(*command, "b", "--partition", "small")
    assert result.code == 64
    assert "but a node has 1" in result.err


def test_a_sweep_of_jobs(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path, program: Program
) -> None:
    """One job each, whose names and settings are the runs'; the same command waits for them."""
    write_chain()
    program("sinfo", "echo 'batch*|1|64|64000|(null)'")
    program("sbatch", 'for last; do :; done; echo "$last" >>submitted; wc -l <submitted')
    program("squeue", "")
    program("sacct", "")
    command = ("sweep", "lr=1e-3,3e-3", "epochs=1..3", "--name", "s", "--submit", "--time", "10")
    result = dnictl(*command, "--backend", "process", "--qos", "low")
    assert result.code == 0, result.err
    assert result.err.splitlines()[-1].endswith("--name s --wait")
    scripts = [Path(line) for line in (folder / "submitted").read_text().splitlines()]
    assert [script.parent.name for script in scripts][1::2] == [
        "s-2-lr0.001-epochs2", "s-4-lr0.003-epochs1", "s-6-lr0.003-epochs3",
    ]  # fmt: skip
    assert scripts[0].read_text().splitlines()[1:4] == [
        "#SBATCH --job-name=s-1-lr0.001-epochs1", "#SBATCH --qos=low", "#SBATCH --time=10",
    ]  # fmt: skip
    for number, script in enumerate(scripts):
        its = Record.read(script.parent)
        assert its.specs()[0].epochs == number % 3 + 1
        ended(its, "finished", 0)
        line = {"kind": "eval", "epoch": 1, "time": 1.0, "loss": 1.0, "accuracy": number / 10}
        append_line(its.run.metrics("top"), line)
    found = dnictl(*command, "--wait", "--json").json
    assert len((folder / "submitted").read_text().splitlines()) == 6
    assert [run["value"] for run in found["runs"]] == [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert found["runs"][0]["run"] == "s-6-lr0.003-epochs3"
