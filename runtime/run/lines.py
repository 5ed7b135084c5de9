"""Reading growing files of lines: what is new, and the last few."""

from __future__ import annotations

import contextlib
import errno
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

_LINE_BYTES = 1 << 20
"""A longer line counts as several."""

_MOST_BYTES = 256 << 20
"""Of a longer file only the end is read: code in a container may make one of any length."""


class LineReader(Generic[Parsed]):
    """The lines that are added to a file, each once and complete; damaged ones are skipped.

    If the file is replaced or emptied, it is read from its beginning. It may not exist yet; a line
    must begin at ``offset``, in bytes.
    """

    def __init__(self, path: Path, parse: Parse[Parsed], *, offset: int = 0) -> None:
        self._path = path
        self._parse = parse
        self._offset = offset
        self._rest = b""
        self._read: deque[bytes] = deque()
        self._inode: int | None = None

    def new(self, *, all_of_it: bool = False) -> Iterator[Parsed]:
        """Yield what was added since the last call; ``all_of_it``: also an unfinished line."""
        for line in self._lines(all_of_it):
            if (parsed := self._parse(line)) is not None:
                yield parsed

    def _lines(self, all_of_it: bool) -> Iterator[bytes]:
        try:
            with opened(self._path) as file:
                yield from self._read_from(file)
        except OSError as error:
            # ESTALE, on NFS: another host replaced the file after it was opened here.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        if all_of_it and self._rest:
            line, self._rest = self._rest, b""
            yield line

    def _read_from(self, file: BinaryIO) -> Iterator[bytes]:
        status = os.fstat(file.fileno())
        replaced = self._inode not in (None, status.st_ino)
        self._inode = status.st_ino
        if replaced or status.st_size < self._offset:  # or emptied
            self._offset, self._rest = 0, b""
            self._read.clear()
        if status.st_size - self._offset > _MOST_BYTES:
            self._offset, self._rest = status.st_size - _MOST_BYTES, b""
        file.seek(self._offset)
        while self._read or (block := file.read(_BLOCK_BYTES)):
            if not self._read:
                self._offset += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                self._read.extend(lines)
                if len(self._rest) > _LINE_BYTES:
                    self._read.append(self._rest)
                    self._rest = b""
            while self._read:
                yield self._read.popleft()


def offset_of_last(path: Path, count: int, mark: bytes = b"\n") -> int:
    """Return the offset of a line after which ``count`` lines, or a few more, contain ``mark``.

    If there are fewer, or no file, return 0.
    """
    with contextlib.suppress(FileNotFoundError), opened(path) as file:
        start = file.seek(0, os.SEEK_END)
        count += 1  # the first line found may be cut off
        first = max(start - _MOST_BYTES, 0)
        while start > first and count > 0:
            end, start = start, max(start - _BLOCK_BYTES, first)
            file.seek(start)
            count -= file.read(end - start).count(mark)
        file.seek(max(start - 1, 0))
        if start:
            file.readline(_LINE_BYTES)
        return file.tell()
    return 0


def last_lines(path: Path) -> list[str]:
    """Return the last ten lines of a text file; none if it cannot be read."""
    try:
        with opened(path) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 65536, 0))
            return file.read().decode(errors="replace").splitlines()[-10:]
    except OSError:
        return []
