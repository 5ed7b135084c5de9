"""Reading files that grow: what is new, and the last few lines."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.files import append_line, write_atomic
from dni_runtime.run import lines
from dni_runtime.run.lines import LineReader, offset_of_last


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Numbered lines of many lengths, every tenth of another kind, in attempts of thirty."""
    path = tmp_path / "long.jsonl"
    for number in range(300):
        kind = "eval" if number % 10 == 0 else "train"
        line = {"n": number, "kind": kind, "attempt": 1 + number // 30, "x": "x" * (number % 37)}
        append_line(path, line)
    return path


@pytest.fixture(params=[16, 100, 1 << 20])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", request.param)
    return int(request.param)


def parse(text: bytes, mark: bytes = b"") -> dict[str, Any] | None:
    try:
        return dict(json.loads(text)) if mark in text else None
    except ValueError:
        return None


def numbers(reader: LineReader[dict[str, Any]]) -> list[int]:
    return [line["n"] for line in reader.new()]


def test_each_line_comes_once(path: Path, block: int) -> None:
    reader = LineReader(path, partial(parse, mark=b'"kind":"train"'))
    assert numbers(reader) == [n for n in range(300) if n % 10]
    assert numbers(reader) == []
    with path.open("ab") as file:
        file.write(b'{"n": 300,"kind":"train"')
    assert numbers(reader) == []
    with path.open("ab") as file:
        file.write(b"}\n")
    assert numbers(reader) == [300]


def test_lines_that_nobody_took_come_later(path: Path, block: int) -> None:
    reader = LineReader(path, parse)
    first = [next(reader.new())["n"] for _ in range(3)]
    assert first + numbers(reader) == list(range(300))


def test_a_file_that_was_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nunfini")
    reader = LineReader(path, bytes)
    assert list(reader.new()) == [b"one", b"two"]
    path.write_bytes(b"new\n")
    assert list(reader.new(all_of_it=True)) == [b"new"]


def test_a_file_that_was_replaced_is_read_from_its_beginning(path: Path) -> None:
    reader = LineReader(path, parse)
    assert len(numbers(reader)) == 300
    write_atomic(path, path.read_bytes())
    for _ in range(2):
        append_line(path, {"n": 300})
    assert numbers(reader) == [*range(300), 300, 300]


@pytest.mark.parametrize("count", [0, 1, 7, 300, 1000])
def test_the_last_few(path: Path, block: int, count: int) -> None:
    found = numbers(LineReader(path, parse, offset=offset_of_last(path, count)))
    assert found == list(range(300))[300 - len(found) :]
    assert len(found) >= min(count, 300)
    evaluations = LineReader(
        path, parse, offset=offset_of_last(path, min(count, 30), b'"kind":"eval"')
    )
    assert len([n for n in numbers(evaluations) if n % 10 == 0]) >= min(count, 30)


def test_reading_does_not_hold_the_file(path: Path) -> None:
    """A thousand logs are followed at once."""
    before = len(os.listdir("/proc/self/fd"))
    readers = [LineReader(path, bytes) for _ in range(10)]
    for reader in readers:
        assert len(list(reader.new())) == 300
    assert len(os.listdir("/proc/self/fd")) == before


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"n": 1}\nnonsense\n{"n": 2}\n{"n": 3')
    reader = LineReader(path, parse)
    assert numbers(reader) == [1, 2]
    with path.open("ab") as file:
        file.write(b"}\n")
    assert numbers(reader) == [3]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_file_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    """Code in a container can make one: it takes neither memory nor time without a bound."""
    monkeypatch.setattr(lines, "_MOST_BYTES", 8 << 20)
    path = tmp_path / "m.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(end + b'{"n":1}\n')
    read = list(LineReader(path, bytes).new())
    assert len(read) < 10
    assert max(map(len, read)) <= 3 << 20
    assert read[-1].endswith(b'{"n":1}')
    assert offset_of_last(path, 5) >= (1 << 40) - (8 << 20)
