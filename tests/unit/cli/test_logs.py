"""``logs``."""

from __future__ import annotations

import json

import pytest

from dni_runtime.run.record import Record
from dnictl.logs import Follower
from tests.unit.cli.conftest import Dnictl, ended


@pytest.fixture
def logs(record: Record) -> Record:
    ended(record, "finished", 0)
    bottom = "2026-01-01 10:00:00,100 INFO one\n2026-01-01 10:00:00,300 INFO three\n  more\n"
    record.run.log("bottom", 1).write_text(bottom)
    record.run.log("top", 1).write_text("2026-01-01 10:00:00,200 INFO two\nunfinished")
    return record


def test_logs_are_merged_by_time(dnictl: Dnictl, logs: Record) -> None:
    lines = dnictl("logs").out.splitlines()
    assert lines == [
        "bottom | 2026-01-01 10:00:00,100 INFO one",
        "top    | 2026-01-01 10:00:00,200 INFO two",
        "top    | unfinished",
        "bottom | 2026-01-01 10:00:00,300 INFO three",
        "bottom |   more",
    ]
    assert sorted(dnictl("logs", "-f").out.splitlines()) == sorted(lines)


def test_some_logs(dnictl: Dnictl, logs: Record) -> None:
    assert dnictl("logs", "top").out.splitlines()[1] == "unfinished"
    assert dnictl("logs", "small-1", "top", "--tail", "1").out == "unfinished\n"
    assert len(dnictl("logs", "--tail", "2").out.splitlines()) == 2
    first = json.loads(dnictl("logs", "bottom", "--json").out.splitlines()[0])
    assert first == {
        "module": "bottom", "attempt": 1, "time": "2026-01-01 10:00:00,100",
        "line": "2026-01-01 10:00:00,100 INFO one",
    }  # fmt: skip


def test_the_end_of_a_long_log_is_all_that_is_read(
    dnictl: Dnictl, logs: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [f"2026-01-01 10:00:{n % 60:02},000 INFO {n}\n" for n in range(1000)]
    path = logs.run.log("bottom", 1)
    path.write_text("".join(text))
    monkeypatch.setattr("dni_runtime.run.lines._BLOCK_BYTES", 512)
    assert Follower(path, "bottom", 1, 5)._lines._offset > path.stat().st_size - 1024
    assert dnictl("logs", "bottom", "--tail", "5").out == "".join(text[-5:])
    assert dnictl("logs", "bottom", "--tail", "0").out == ""


def test_logs_that_are_not_there(dnictl: Dnictl, logs: Record) -> None:
    result = dnictl("logs", "--attempt", "9")
    assert (result.code, result.out) == (0, "")
    assert "no such logs" in result.err
