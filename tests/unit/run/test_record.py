"""Run directories: what is in a new one, and how runs are found again."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dni_runtime import __version__
from dni_runtime.errors import CheckpointError, DataError, UsageError
from dni_runtime.files import read_json, write_json
from dni_runtime.plan.create import check_place, create_run, new_run_id
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.run.record import Record, find_run, list_runs


def test_names_sort_by_time_and_differ() -> None:
    names = {new_run_id("fashion-mlp") for _ in range(20)}
    assert len(names) > 1
    assert all(re.fullmatch(r"fashion-mlp-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)


def test_what_a_run_holds(record: Record, prepared: CheckedChain) -> None:
    run = record.run
    assert run.root.stat().st_mode & 0o777 == 0o700
    assert run.chain_file.read_bytes() == prepared.path.read_bytes()
    assert (run.sources / "pkg" / "layers.py").read_text() == "pass\n"
    assert (record.name, record.chain, record.backend) == ("small-1", "small", "process")
    assert record.modules == ("bottom", "middle", "top")
    assert (record.epochs, record.batches_per_epoch, record.total_steps) == (4, 8, 32)
    assert record.specs() == (prepared.chain, prepared.workers)


def test_a_run_is_not_overwritten(record: Record, prepared: CheckedChain) -> None:
    with pytest.raises(UsageError, match="already holds a run") as caught:
        create_run(record.run.root, prepared, backend="process")
    assert "dnictl resume" in str(caught.value)


def test_a_folder_of_the_users_is_no_run_directory(tmp_path: Path, prepared: CheckedChain) -> None:
    """Its chain.yaml would be replaced, and others could not read it any more."""
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o755)
    create_run(folder, prepared, backend="process")  # an empty one is as good as none
    other = prepared.base
    for make in (create_run, lambda root, *_, **__: check_place(root, tmp_path)):
        with pytest.raises(UsageError, match=r"'.*project' is not empty"):
            make(other, prepared, backend="process")
    assert sorted(path.name for path in other.iterdir()) == ["chain.yaml", "layers.py"]
    assert other.stat().st_mode & 0o777 != 0o700


def test_a_folder_that_cannot_be_made(tmp_path: Path, prepared: CheckedChain) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be created"):
        create_run(tmp_path / "file" / "run", prepared, backend="process")


def test_a_user_without_a_name_may_have_runs(
    prepared: CheckedChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is started with a number of a user alone."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    run = create_run(tmp_path / "runs" / "mine", prepared, backend="process")
    assert Record.read(run.root).user == f"user {os.geteuid()}"


def test_steps_of_a_run(prepared: CheckedChain) -> None:
    def steps(**changes: object) -> tuple[int | None, int | None]:
        chain = prepared.chain.model_copy(update=changes)
        other = replace(prepared, chain=chain)
        return other.batches_per_epoch, other.total_steps

    data = prepared.chain.data
    assert steps() == (8, 32)
    assert steps(steps=10) == (8, 10)
    assert steps(steps=100) == (8, 32)
    assert steps(data=data.model_copy(update={"drop_last": True})) == (7, 28)
    single = prepared.info.model_copy(update={"train_samples": 7 * data.batch_size + 1})
    assert replace(prepared, info=single).batches_per_epoch == 7, "it cannot be normalised"
    unknown = prepared.info.model_copy(update={"train_samples": None})
    assert replace(prepared, info=unknown).total_steps is None


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run directory"):
        Record.read(tmp_path)


def test_a_damaged_record(record: Record) -> None:
    document = read_json(record.run.record)
    assert document is not None
    del document["modules"]
    write_json(record.run.record, document)
    with pytest.raises(DataError, match="modules"):
        Record.read(record.run.root)


@pytest.mark.parametrize("module", ["/tmp/made", "../made", "made.x", ""])
def test_a_record_names_no_paths(record: Record, module: str) -> None:
    """Paths are made of workers' names, also of those that somebody else has written."""
    document = read_json(record.run.record)
    assert document is not None
    write_json(record.run.record, document | {"modules": [module]})
    with pytest.raises(DataError, match=r"is damaged: modules\.0: .* is not the name of a worker"):
        Record.read(record.run.root)


@pytest.mark.parametrize("name", ["/tmp/made", "../made", "..", ".", "", "a/b"])
def test_a_record_is_not_named_by_a_path(record: Record, name: str) -> None:
    """TensorBoard's files go into a folder of that name."""
    document = read_json(record.run.record)
    assert document is not None
    write_json(record.run.record, document | {"run": name})
    with pytest.raises(DataError, match=r"is damaged: run: .* is not the name of a folder"):
        Record.read(record.run.root)


@pytest.mark.parametrize("name", ["a", ".a", "..a", "...", "a.b", "my run", "\u00fc["])
def test_a_run_has_the_name_of_its_folder(
    tmp_path: Path, prepared: CheckedChain, name: str
) -> None:
    create_run(tmp_path / name, prepared, backend="process")
    assert Record.read(tmp_path / name).name == name


def test_damaged_specs(record: Record) -> None:
    record.run.spec("top").write_text("{}")
    with pytest.raises(DataError, match=f"a run of dni-runtime {__version__}, cannot be read"):
        record.specs()


def change(record: Record, format: int = 1, **versions: object) -> Record:
    document = read_json(record.run.record)
    assert document is not None
    changes = {"format": format, "versions": document["versions"] | versions}
    write_json(record.run.record, document | changes)
    return Record.read(record.run.root)


def test_a_run_in_another_format_says_who_made_it(record: Record) -> None:
    with pytest.raises(DataError, match=r"dni-runtime 9\.1\.0, in format 7") as caught:
        change(record, format=7, dni_runtime="9.1.0")
    assert "use dni-runtime 9.1.0" in str(caught.value)


def test_versions_are_compared_before_a_run_goes_on(record: Record) -> None:
    assert record.compare_versions() is None
    older = change(record, dni_runtime="0.0.9")
    assert older.compare_versions() == f"created by dni-runtime 0.0.9, resumed with {__version__}"
    newer = change(record, dni_runtime="9.1.0", checkpoint=8)
    with pytest.raises(CheckpointError) as caught:
        newer.compare_versions()
    assert "created by dni-runtime 9.1.0 with checkpoints of format 8" in str(caught.value)


@pytest.fixture
def runs(tmp_path: Path, prepared: CheckedChain) -> Path:
    folder = tmp_path / "many"
    for number, name in enumerate(["b-1", "a-1", "a-2"]):
        create_run(folder / name, prepared, backend="process")
        record = read_json(folder / name / "run.json")
        assert record is not None
        write_json(folder / name / "run.json", record | {"created": 1000.0 + number})
    (folder / "other").mkdir()
    (folder / "notes.txt").touch()
    return folder


def test_runs_are_listed_oldest_first(runs: Path) -> None:
    assert [record.name for record in list_runs(runs)] == ["b-1", "a-1", "a-2"]
    assert list_runs(runs / "nothing") == []


def test_finding_a_run(runs: Path) -> None:
    assert find_run(None, runs).name == "a-2"
    assert find_run("a-1", runs).name == "a-1"
    assert find_run("b", runs).name == "b-1"
    assert find_run(str(runs / "b-1"), Path("elsewhere")).name == "b-1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a", "'a' is the beginning of 2 runs"),
        ("", "name is empty"),
        ("c", "no run 'c'.*\n.*runs: b-1, a-1, a-2"),
        ("x/y", "'x/y' is not a run directory"),
    ],
)
def test_no_such_run(runs: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_run(name, runs)
    assert re.search(message, str(caught.value))


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no runs in"):
        find_run(None, tmp_path)
