"""Reading growing files of lines: new lines, and lines at the end, without reading all of it."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from dni_runtime.files import opened

Parsed = TypeVar("Parsed")
Parse = Callable[[bytes], Parsed | None]
"""Turns a line into what it says; None if it is damaged."""

_BLOCK_BYTES = 1 << 20
_STEP_BACK_BYTES = 1 << 13


class NewLines:
    """The lines that are added to a file, each once and complete.

    The file may not exist yet; a line must begin at ``offset``, in bytes.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""
        self._read: deque[bytes] = deque()

    def read(self, *, all_of_it: bool = False) -> Iterator[bytes]:
        """Yield the lines added since the last call; ``all_of_it``: also an unfinished one."""
        with contextlib.suppress(FileNotFoundError), opened(self._path) as file:
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


class LineReader(Generic[Parsed]):
    """What is added to a file of lines, each line once; damaged lines are skipped."""

    def __init__(self, path: Path, parse: Parse[Parsed], *, offset: int = 0) -> None:
        self._lines = NewLines(path, offset=offset)
        self._parse = parse

    def new(self) -> Iterator[Parsed]:
        """Yield what was added since the last call."""
        for line in self._lines.read():
            if (parsed := self._parse(line)) is not None:
                yield parsed


def offset_of_last(
    path: Path, count: int, mark: bytes = b"\n", *, within: int | None = None
) -> int:
    """Return the offset of a line after which ``count`` lines, or a few more, contain ``mark``.

    If there are fewer, return that of the first line searched; ``within``: search only this many
    bytes back from the end. The file may not exist.
    """
    with contextlib.suppress(FileNotFoundError), opened(path) as file:
        start = file.seek(0, os.SEEK_END)
        stop = 0 if within is None else max(start - within, 0)
        count += 1  # the first line found may be cut off
        while start > stop and count > 0:
            end, start = start, max(start - _BLOCK_BYTES, stop)
            file.seek(start)
            count -= file.read(end - start).count(mark)
        return _next_line(file, start)
    return 0


def last_line(
    path: Path, parse: Parse[Parsed], *, before: int | None = None, within: int | None = None
) -> Parsed | None:
    """Return the last complete line that can be parsed, or None.

    Search only before the offset ``before``, and only ``within`` bytes back from there. The file
    may not exist.
    """
    with contextlib.suppress(FileNotFoundError), opened(path) as file:
        end = file.seek(0, os.SEEK_END) if before is None else before
        stop = 0 if within is None else max(end - within, 0)
        rest = b""
        while end > stop:
            start = max(end - _STEP_BACK_BYTES, stop)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            end = start
            for line in (*reversed(lines), *([rest] if start == 0 else [])):
                if (parsed := parse(line)) is not None:
                    return parsed
    return None


def offset_where(path: Path, parse: Parse[Parsed], reached: Callable[[Parsed], bool]) -> int:
    """Return the offset of the first line for which ``reached`` holds, by binary search.

    ``reached`` must hold for all later lines, too. Without such a line, return the end of the file.
    """
    low = 0
    with contextlib.suppress(FileNotFoundError), opened(path) as file:
        high = file.seek(0, os.SEEK_END)
        while low < high:
            middle = (low + high) // 2
            parsed = _line_after(file, middle, parse)
            if parsed is None or reached(parsed):
                high = middle
            else:
                low = middle + 1
        return _next_line(file, low)
    return low


def last_lines(path: Path) -> list[str]:
    """Return the last ten lines of a text file; none if it cannot be read."""
    try:
        with opened(path) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 65536, 0))
            return file.read().decode(errors="replace").splitlines()[-10:]
    except OSError:
        return []


def _next_line(file: BinaryIO, offset: int) -> int:
    """Seek to the first line that begins at or after an offset, and return its offset."""
    file.seek(max(offset - 1, 0))
    if offset:
        file.readline()
    return file.tell()


def _line_after(file: BinaryIO, offset: int, parse: Parse[Parsed]) -> Parsed | None:
    """Return the first complete line that begins at or after an offset."""
    _next_line(file, offset)
    for line in file:
        if line.endswith(b"\n") and (parsed := parse(line)) is not None:
            return parsed
    return None
