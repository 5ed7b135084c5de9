"""Reading files of lines that grow: what is new, and from the end; never a whole file at once."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK_BYTES = 1 << 20
_STEP_BACK_BYTES = 1 << 13


class NewLines:
    """The lines that are added to a file, each once and whole.

    Args:
        path: The file, which may not be there yet.
        offset: Begin so many bytes after its beginning, where a line begins.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""
        self._read: deque[bytes] = deque()

    def read(self, *, all_of_it: bool = False) -> Iterator[bytes]:
        """What has been added since the last call; with ``all_of_it`` also a line without end."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # emptied since
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            while self._read or (block := file.read(_BLOCK_BYTES)):
                if not self._read:
                    self._offset += len(block)
                    *lines, self._rest = (self._rest + block).split(b"\n")
                    self._read.extend(lines)
                while self._read:
                    yield self._read.popleft()
            if all_of_it and self._rest:
                line, self._rest = self._rest, b""
                yield line


class LineReader:
    """Reads the JSON lines that are added to a file, each once; damaged lines are passed over.

    Args:
        path: The file, which may not be there yet.
        offset: Begin so many bytes after its beginning, where a line begins.
        without: Leave out lines that hold this.
    """

    def __init__(self, path: Path, *, offset: int = 0, without: bytes | None = None) -> None:
        self._lines = NewLines(path, offset=offset)
        self._without = without

    def new(self) -> Iterator[dict[str, Any]]:
        """What has been added since the last call."""
        for line in self._lines.read():
            if self._without is None or self._without not in line:
                document = _parse(line)
                if document is not None:
                    yield document


def offset_of_last(
    path: Path, count: int, mark: bytes = b"\n", *, within: int | None = None
) -> int:
    """Where a line begins from which on ``count`` lines, or a few more, hold ``mark``.

    Args:
        path: The file, which may not be there.
        count: How many.
        mark: What is looked for.
        within: Only so many bytes back from the end.

    Returns:
        Its offset; that of the first line looked at where there are fewer.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        stop = 0 if within is None else max(start - within, 0)
        count += 1  # the first line that is met may be cut off
        while start > stop and count > 0:
            end, start = start, max(start - _BLOCK_BYTES, stop)
            file.seek(start)
            count -= file.read(end - start).count(mark)
        return _next_line(file, start)
    return 0


def last_line(
    path: Path, mark: bytes, *, before: int | None = None, within: int | None = None
) -> dict[str, Any] | None:
    """The last whole JSON line that holds ``mark``; None where there is none.

    Args:
        path: The file, which may not be there.
        mark: What is looked for.
        before: Only before this offset.
        within: Only so many bytes back from there.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) if before is None else before
        stop = 0 if within is None else max(end - within, 0)
        rest = b""
        while end > stop:
            start = max(end - _STEP_BACK_BYTES, stop)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            end = start
            for line in (*reversed(lines), *([rest] if start == 0 else [])):
                if mark in line and (document := _parse(line)) is not None:
                    return document
    return None


def offset_where(path: Path, reached: Callable[[dict[str, Any]], bool]) -> int:
    """Where the first JSON line begins for which ``reached`` holds, as for all after it.

    Looks at a few lines only (a binary search).

    Returns:
        Its offset; that of the end where there is none.
    """
    low = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        high = file.seek(0, os.SEEK_END)
        while low < high:
            middle = (low + high) // 2
            document = _line_after(file, middle)
            if document is None or reached(document):
                high = middle
            else:
                low = middle + 1
        return _next_line(file, low)
    return low


def last_lines(path: Path, count: int = 10) -> list[str]:
    """The last lines of a text file; none when it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 65536, 0))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _next_line(file: BinaryIO, offset: int) -> int:
    """Where the first line begins at or after an offset; the file is there then."""
    file.seek(max(offset - 1, 0))
    if offset:
        file.readline()
    return file.tell()


def _line_after(file: BinaryIO, offset: int) -> dict[str, Any] | None:
    """The first whole JSON line that begins at or after an offset."""
    _next_line(file, offset)
    for line in file:
        if line.endswith(b"\n") and (document := _parse(line)) is not None:
            return document
    return None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
