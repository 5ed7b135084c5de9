"""The run directory's files: cut off by a full disk, or replaced while they are read."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

from dni_runtime.errors import DamagedError, DataError
from dni_runtime.files import (
    append_line,
    open_file,
    overwrite_json,
    peek_json,
    read_json,
    write_json,
)
from dni_runtime.run.cuts import read_document
from dni_runtime.run.documents.reports import Control
from dni_runtime.run.lines import LineReader, offset_of_last
from dni_runtime.run.rundir import RunDir
from tests.lines import read_lines


def test_lines_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(read_lines(path)) == []
    append_line(path, {"id": 1})
    with path.open("a") as file:
        file.write('{"id":2,"lo')  # cut off; the next one follows at once
    for id in (3, 4):
        append_line(path, {"id": id})
    with path.open("a") as file:
        file.write('{"id":5')  # still being written
    assert list(read_lines(path)) == [{"id": 1}, {"id": 4}]


@pytest.mark.parametrize("times", [2, 3])
def test_a_file_that_another_host_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """NFS tells those who have opened the old one so; a file that is always stale is an error."""
    path, left = tmp_path / "top.json", [OSError(errno.ESTALE, "stale")] * times
    write_json(path, {"id": 1})

    def opened(path: Path) -> io.BytesIO:
        if left:
            raise left.pop()
        return io.BytesIO(b'{"id": 2}')

    monkeypatch.setattr("dni_runtime.files.opened", opened)
    if times < 3:
        assert read_json(path) == {"id": 2}
    else:
        with pytest.raises(OSError, match="stale"):
            read_json(path)


def test_a_look_at_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "top.json"
    assert peek_json(path) == {}
    for text in ("", "[1]", "null"):
        path.write_text(text)
        assert peek_json(path) == {}
    write_json(path, {"id": 1})
    assert peek_json(path) == {"id": 1}
    assert peek_json(tmp_path) == {}


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/x.json'"):
        write_json(tmp_path / "x.json", {})
    assert not list(tmp_path.iterdir())


def test_a_document_written_in_place_takes_no_more_room(tmp_path: Path) -> None:
    """So a full disk does not matter, and who has the file open sees what is new."""
    path = tmp_path / "a.json"
    overwrite_json(path, {"attempt": 11, "wanted": "restart"})
    before = path.stat()
    with path.open("rb", buffering=0) as file:
        assert json.loads(file.read()) == {"attempt": 11, "wanted": "restart"}
        overwrite_json(path, {"attempt": 12, "wanted": "run"})
        file.seek(0)
        assert json.loads(file.read()) == read_json(path) == {"attempt": 12, "wanted": "run"}
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_blocks) == (
        before.st_ino, before.st_size, before.st_blocks,
    )  # fmt: skip
    assert after.st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


SECRET = '{"cut": 1}\n'
KINDS = ("link", "folder", "pipe", "device")


@pytest.fixture(params=KINDS)
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    """Code in a container has put something else in the place of files."""
    run, outside = RunDir(tmp_path / "run"), tmp_path / "outside"
    run.create()
    outside.mkdir()
    (outside / "m.json").write_text(SECRET)
    places = [run.ledger("m"), run.worker("m"), run.metrics("m").with_suffix(".json")]
    for path in places:
        match request.param:
            case "link" | "folder":
                path.symlink_to(outside / "m.json")
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
    for folder in (run.group("m"), run.checkpoint(7, "m").parent):
        if request.param == "folder":
            folder.rmdir() if folder.exists() else None
            folder.symlink_to(outside)
        else:
            folder.mkdir(exist_ok=True)
            (folder / "m.json").symlink_to(outside / "m.json")
    return run


def test_what_a_container_has_planted_is_not_followed(planted: RunDir, tmp_path: Path) -> None:
    """Neither read, nor changed, nor waited for: it counts as missing."""
    places = [planted.ledger("m"), planted.worker("m"), planted.group("m") / "m.json"]
    for path in (*places, planted.checkpoint(7, "m").with_suffix(".json")):
        assert read_json(path) is None
        assert list(LineReader(path, bytes).new(all_of_it=True)) == []
        assert offset_of_last(path, 3) == 0
        for change in (append_line, overwrite_json):
            with pytest.raises(FileNotFoundError, match="is a link, or no plain file"):
                change(path, {"changed": True})
    with pytest.raises(DamagedError, match="is a link, or no plain file"):
        read_document(planted.checkpoint(7, "m"))
    assert (tmp_path / "outside" / "m.json").read_text() == SECRET


def test_a_file_with_two_names_is_not_changed(tmp_path: Path) -> None:
    """One of them may be of a file elsewhere; backups by hard links can be read."""
    run, outside = RunDir(tmp_path / "run"), tmp_path / "outside.json"
    run.create()
    outside.write_text(SECRET)
    os.link(outside, run.ledger("m"))
    for change in (append_line, overwrite_json):
        with pytest.raises(FileNotFoundError):
            change(run.ledger("m"), {"changed": True})
    assert outside.read_text() == SECRET
    assert read_json(run.ledger("m")) == {"cut": 1}


def test_a_users_own_links_are_followed(tmp_path: Path) -> None:
    """A folder of the run may lie on another disk; no container can make such a link."""
    run, disk = RunDir(tmp_path / "run"), tmp_path / "disk"
    run.create()
    disk.mkdir()
    for folder in (run.checkpoints, run.worker("m").parent, run.controls):
        folder.rmdir()
        folder.symlink_to(disk)
    run.checkpoint(7, "m").parent.mkdir()
    write_json(part := run.checkpoint(7, "m").with_suffix(".json"), {"cut": 7})
    assert read_json(part) == {"cut": 7}
    write_json(run.worker("m"), {"pid": 1})
    assert read_json(run.worker("m")) == {"pid": 1}
    Control(order="stop").write(run.control("m"))
    assert read_json(run.control("m"))["order"] == "stop"
    assert {path.name for path in disk.iterdir()} == {"000000000007", "m.json"}


def test_a_file_that_is_closed_to_us_is_named(tmp_path: Path) -> None:
    path = RunDir(tmp_path).worker("m")
    with pytest.raises(OSError, match="workers"):
        open_file(path, os.O_WRONLY)


def test_json_that_is_too_long(tmp_path: Path) -> None:
    with (tmp_path / "m.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="it has more than 67,108,864 bytes"):
        read_json(tmp_path / "m.json")
    assert peek_json(tmp_path / "m.json") == {}


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="is not JSON"):
        read_json(tmp_path / "m.json")
    assert peek_json(tmp_path / "m.json") == {}
