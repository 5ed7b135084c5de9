"""The run directory's files: lines of which a full disk took only a part."""

from __future__ import annotations

from pathlib import Path

from dni_runtime.rundir import append_line, read_lines


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
