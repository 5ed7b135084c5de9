"""``rm`` and ``prune``: which runs they remove, and what they never touch."""

from __future__ import annotations

import io
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.files import read_json, write_json
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import process_birth
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import ENTRIES, RunDir
from dni_runtime.schedulers.schedulers import read_state
from tests.unit.cli.conftest import Dnictl, WriteChain, ended

Make = Callable[[str, str], Record]


@pytest.fixture
def make(write_chain: WriteChain, folder: Path) -> Make:
    """Create a run of this name that has ended in this way."""
    prepared = prepare(write_chain())

    def run(name: str, phase: str) -> Record:
        root = folder / "runs" / name
        create_run(root, prepared, backend="process")
        record = Record.read(root)
        ended(record, phase, 0)
        (root / "checkpoints" / "000000000012").mkdir()
        (root / "checkpoints" / "000000000012" / "top.safetensors").write_bytes(b"x" * 5_000_000)
        return record

    return run


def test_runs_are_removed_with_all_that_is_theirs(dnictl: Dnictl, make: Make, folder: Path) -> None:
    outside = folder / "mine"
    outside.mkdir()
    (outside / "notes").write_text("kept")
    for name in ("a-1", "a-2", "b-1"):
        root = make(name, "finished").run.root
        (root / "metrics" / "away").symlink_to(outside)
        (root / "tensorboard").symlink_to(outside)
    result = dnictl("rm", "a-1", "b", "--yes")
    assert (result.code, result.out) == (0, "a-1\nb-1\n")
    assert "removed 10." in result.err
    assert [entry.name for entry in (folder / "runs").iterdir()] == ["a-2"]
    assert (outside / "notes").read_text() == "kept"


def test_a_copy_is_a_run_of_its_own(dnictl: Dnictl, make: Make, folder: Path) -> None:
    """Its record has the name of the run that it was copied from."""
    root = make("a-1", "finished").run.root
    shutil.copytree(root, root.with_name("kept"))
    for command in (("prune", "--keep", "0", "--dry-run"), ("rm", "a-1", "kept", "--yes")):
        result = dnictl(*command, "--json").json
        assert sorted(result["runs"]) == ["a-1", "kept"]
        assert result["bytes"] > 10_000_000
    assert list((folder / "runs").iterdir()) == []


def no_answer(jobs: object) -> NoReturn:
    raise UnavailableError("squeue does not answer")


def test_nothing_is_removed_unless_all_can_be(
    dnictl: Dnictl, make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("a-1", "finished")
    record = make("a-2", "finished")
    assert dnictl("rm", "a").code == 64  # two runs
    result = dnictl("rm", "a-1", "a-2")  # nobody can be asked
    assert result.code == 64
    assert "a-1, a-2: 10." in result.err

    def refused(*words: str) -> None:
        result = dnictl("rm", "a-1", "a-2", "--yes")
        assert result.code in (64, 69)
        assert (folder / "runs" / "a-1" / "run.json").exists()
        for word in words:
            assert word in result.err

    ended(record, "running", 0, pid=os.getpid())
    refused("'a-2' is running", "dnictl stop a-2")
    ended(record, "stopped", 75)
    JobRecord(job="7", nodes=(0, 0)).write(record.run.job)
    for module in ("supervise.removal", "schedulers.slurm.scheduler"):
        monkeypatch.setattr(f"dni_runtime.{module}.job_infos", no_answer)
    refused("squeue does not answer")  # it cannot be known whether the job is over
    record.run.job.unlink()
    (record.run.root / "notes.txt").write_text("mine")
    refused("holds 'notes.txt', which is no run's")
    (record.run.root / "notes.txt").unlink()
    record.run.root.rename(folder / "elsewhere")
    record.run.root.symlink_to(folder / "elsewhere")
    refused("is a link", "elsewhere")


def test_workers_without_a_supervisor_keep_their_run(dnictl: Dnictl, make: Make) -> None:
    """Started one by one, or by mpirun on hosts that say nothing."""
    record = make("a-1", "new")
    here = socket.gethostname()
    report = Report(module=record.modules[0], attempt=1, state="running", host=here)
    born = process_birth(os.getpid())
    report.model_copy(update={"pid": os.getpid(), "born": born}).write(
        record.run.worker(record.modules[0])
    )
    assert f"process {os.getpid()}" in dnictl("rm", "a-1", "--yes").err
    document = read_json(record.run.record)
    assert document is not None
    write_json(record.run.record, document | {"scheduler": "mpi"})
    for name in record.modules:
        report = Report(module=name, attempt=1, state="running", host="elsewhere")
        report.write(record.run.worker(name))
        os.utime(record.run.worker(name), (1, 1))
    record.run.state.unlink(missing_ok=True)
    assert read_state(record.run).phase == "lost"
    assert dnictl("prune", "--keep", "0", "--yes").err == "no such runs\n"


def test_what_belongs_to_others_stays(
    dnictl: Dnictl, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make("a-1", "finished").run.root
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    result = dnictl("rm", "a-1", "--yes")
    assert result.code == 64
    assert "belongs to somebody else" in result.err
    assert dnictl("prune", "--keep", "0", "--yes").err == "no such runs\n"
    assert (root / "run.json").exists()


def test_the_folder_of_a_chain_file_is_not_removed(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    root = folder / "run"
    create_run(root, prepare(write_chain()), backend="process")
    record = Record.read(root)
    record.model_copy(update={"chain_file": root / "chain.yaml"}).write(record.run.record)
    ended(record, "finished", 0)
    result = dnictl("rm", root, "--yes")
    assert "holds 'chain.yaml', which is no run's" in result.err
    assert (root / "chain.yaml").exists()


def test_prune_keeps_the_newest_and_all_that_can_go_on(
    dnictl: Dnictl, make: Make, folder: Path
) -> None:
    phases = ["finished", "lost", "stopped", "failed", "finished", "finished"]
    for number, phase in enumerate(phases):
        make(f"r-{number}", phase)
    for keep in ("4", "5", "9"):
        assert dnictl("prune", "--keep", keep, "--yes").err == "no such runs\n"
    dry = dnictl("prune", "--keep", "1", "--dry-run", "--json").json
    assert dry["runs"] == ["r-0", "r-1", "r-4"]
    assert dry["bytes"] > 15_000_000
    assert not dry["removed"]
    assert len(list((folder / "runs").iterdir())) == 6
    assert dnictl("prune", "--keep", "1", "--yes").out == "r-0\nr-1\nr-4\n"
    left = sorted(entry.name for entry in (folder / "runs").iterdir())
    assert left == ["r-2", "r-3", "r-5"]


def test_a_run_that_cannot_be_read_hides_no_others(
    dnictl: Dnictl, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged ones, and one that gives an error of the system, as those of others do."""
    runs = [make(name, "finished").run for name in ("a-1", "a-2", "a-3", "b-1")]
    runs[0].state.write_text("")
    runs[1].job.write_text("{}")
    runs[2].state.unlink()
    runs[2].state.mkdir()
    assert [row["run"] for row in dnictl("ps", "--json").json] == ["b-1"]
    told = caplog.text
    assert [f"runs/a-{number} is passed over: " in told for number in (1, 2, 3)] == [True] * 3
    assert dnictl("prune", "--keep", "0", "--dry-run").out == "b-1\n"


def test_a_removal_that_is_declined(
    dnictl: Dnictl, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make("a-1", "finished").run.root
    for command in (("rm", "a-1"), ("rm", "a-1", "--json"), ("prune", "--keep", "0")):
        monkeypatch.setattr("sys.stdin", terminal := io.StringIO("n\n"))
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        result = dnictl(*command)
        assert result.code == 0
        assert result.out == "" or not result.json["removed"]
        assert ("nothing was removed" in result.err) == (result.out == "")
        assert root.exists()


def test_no_name_is_that_of_the_only_run(dnictl: Dnictl, record: Record) -> None:
    ended(record, "finished", 0)
    assert dnictl("rm", "", "--yes").code == 64
    assert record.run.record.exists()


def test_a_run_directory_holds_what_is_known_of_it() -> None:
    run = RunDir(Path("/run"))
    paths = run.record, run.beats("t"), run.container.root, run.log("m", 1), run.checkpoint(1, "m")
    assert {path.relative_to("/run").parts[0] for path in paths} <= ENTRIES
