"""The run directory's files: cut off by a full disk, or replaced while they are read."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from dni_runtime.rundir import (
    RunDir,
    append_line,
    overwrite_json,
    peek_json,
    read_json,
    write_json,
)
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

    def read_bytes(path: Path) -> bytes:
        if left:
            raise left.pop()
        return b'{"id": 2}'

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
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


def test_the_best_checkpoint_of_an_older_run(tmp_path: Path) -> None:
    """It was noted beside the folders; whoever goes on with such a run moves it."""
    run = RunDir(tmp_path)
    write_json(tmp_path / "best.json", {"cut": 7})
    assert read_json(run.best) == {"cut": 7}
    run.create()
    assert run.best == run.checkpoints / "best.json"
    assert read_json(run.best) == {"cut": 7}
    assert not (tmp_path / "best.json").exists()


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
