"""Requests to a run, and what the head made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.run.documents.requests import MarkRequest, Scale, Stop
from dni_runtime.run.lines import LineReader


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    assert Stop.peek(path) is None
    for document in (Stop(time=7.5, timeout_s=2), Scale(replicas={"b": 3})):
        document.write(path)
        assert type(document).peek(path) == document


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"timeout_s": "x", "replicas": {"b": 0}}'])
def test_what_is_damaged_asks_for_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    assert [kind.peek(path) for kind in (Stop, Scale)] == [None] * 2


def test_requested_markers_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "marks.jsonl"
    path.write_text('{"id": 4\n')  # a full disk
    lines = [MarkRequest(id=5, mark=8, samples=(10, 2, None)), MarkRequest(id=9, mark=0)]
    for line in lines:
        line.append(path)
    assert list(LineReader(path, MarkRequest.parse).new()) == lines
