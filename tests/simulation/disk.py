"""A simulated shared file system: real files in memory, below Python's own calls.

A killed process touches nothing any more, a disk can be full, and a file that another process has
just made appears late, as it may on NFS (nfs(5), "lookupcache").
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.simulation.world import Process, World

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Stands between the processes and the files below a folder.

    ``late_s`` is the longest time until others see a new file.
    """

    def __init__(self, world: World, root: Path, late_s: float) -> None:
        self.world, self.late_s = world, late_s
        self.operations = 0
        self._root = str(root)
        self._appears: dict[str, tuple[float, Process]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take over the calls of this process."""
        names = {
            "open": self._open, "replace": self._replace, "unlink": self._changes("unlink"),
            "remove": self._changes("remove"), "mkdir": self._changes("mkdir"),
            "rmdir": self._changes("rmdir"), "write": self._writes("write"),
            "pwrite": self._pwrite, "fsync": self._fsync,
            "stat": self._reads("stat"), "lstat": self._reads("lstat"),
            "listdir": self._listdir, "scandir": self._scandir, "chmod": self._changes("chmod"),
        }  # fmt: skip
        self._real = {name: getattr(os, name) for name in names}
        self._io_open = io.open
        for name, function in names.items():
            setattr(os, name, function)
        io.open = self._file  # type: ignore[assignment]
        try:
            yield
        finally:
            io.open = self._io_open
            for name, function in self._real.items():
                setattr(os, name, function)

    def _process(self) -> Process | None:
        """The process that calls; None if it does not belong to the simulation."""
        if self.world.current is None:
            return None
        self.world.check_alive()
        self.operations += 1
        return self.world.current.process

    def _full(self, process: Process | None) -> None:
        if process is not None and process.full_until_s > self.world.now_s:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _hidden(self, process: Process | None, path: Any) -> bool:
        appears = self._appears.get(str(path))
        if appears is None or process is None or process.host == appears[1].host:
            return False
        return self.world.now_s < appears[0]

    def _made(self, process: Process | None, path: Any, *, new: bool) -> None:
        if process is not None and new and self.late_s and str(path).startswith(self._root):
            appears_s = self.world.now_s + self.world.random.uniform(0, self.late_s)
            self._appears[str(path)] = (appears_s, process)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        process, whole = self._process(), path
        if dir_fd is not None:
            whole = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        if flags & _WRITING:
            if new := bool(flags & os.O_CREAT) and not os.path.lexists(whole):
                self._full(process)
            self._made(process, whole, new=new)
        elif self._hidden(process, whole):
            raise FileNotFoundError(errno.ENOENT, "late", str(whole))
        return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))

    def _file(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        process = self._process()
        if not isinstance(path, int) and self._hidden(process, path):
            raise FileNotFoundError(errno.ENOENT, "late", str(path))
        return self._io_open(path, mode, *args, **kwargs)

    def _replace(self, source: Any, target: Any) -> None:
        process = self._process()
        self._made(process, target, new=not os.path.lexists(target))
        self._real["replace"](source, target)

    def _changes(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._process()
            return self._real[name](*args, **kwargs)

        return call

    def _writes(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._full(self._process())
            return self._real[name](*args, **kwargs)

        return call

    def _fsync(self, file: int) -> None:
        process = self._process()
        if process is not None and process.slow_until_s > self.world.now_s:
            self.world.wait(process.slow_until_s - self.world.now_s)
        self._full(process)
        self._real["fsync"](file)

    def _pwrite(self, file: int, data: bytes, offset: int) -> int:
        process = self._process()
        if offset + len(data) > os.fstat(file).st_size:  # else its blocks are there
            self._full(process)
        return int(self._real["pwrite"](file, data, offset))

    def _reads(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._hidden(self._process(), path):
                raise FileNotFoundError(errno.ENOENT, "late", str(path))
            return self._real[name](path, *args, **kwargs)

        return call

    def _listdir(self, path: Any = ".") -> list[str]:
        process = self._process()
        names = self._real["listdir"](path)
        return sorted(one for one in names if not self._hidden(process, os.path.join(path, one)))

    def _scandir(self, path: Any = ".") -> Any:
        process = self._process()
        with self._real["scandir"](path) as entries:
            shown = [one for one in entries if not self._hidden(process, one.path)]
        return contextlib.nullcontext(iter(sorted(shown, key=lambda one: one.name)))
