"""How the files of a run are written and read: whole, in place, line by line, and without links.

Containers can write to some folders of a run; no link that one may have planted there is followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dni_runtime.errors import DataError

WORKER_FOLDERS = ("endpoints", "workers", "metrics", "checkpoints", "snapshots", "ledger")
"""Folders that workers write to; nothing in them is executed or decides what is executed."""

_INNER = re.compile(r"\d{12}|.+\.group")
"""Folders within those: of a cut, of a process group."""

_PLANTED = "it is a link, or no plain file, and is not used"
_PIECE_BYTES = 64 << 20  # of a large file: how much is on disk shows progress
_DOCUMENT_BYTES = 64 << 20  # of a JSON document; code in a container may write a longer one


def xdg_folder(variable: str, default: str) -> Path:
    """Return the user's folder for files of one kind (XDG Base Directory Specification)."""
    root = os.environ.get(variable, "")
    return (Path(root) if root.startswith("/") else Path.home() / default) / "dnictl"


def expanded(path: str | Path) -> Path:
    """Return a path with the user's folder for ``~``; of a user who is unknown it stays."""
    return Path(os.path.expanduser(path))


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or a user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Give an open file's descriptor, and close it afterwards."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def need_room(folder: Path, needed_bytes: int) -> None:
    """Raise ``OSError`` if a folder's disk, or the user's share of it, has less room than that."""
    probe = folder / f".room.{socket.gethostname()}.{secrets.token_hex(4)}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, needed_bytes)
    except OSError as error:
        error.filename = str(folder)
        if is_full(error):  # else the file system cannot say
            raise
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a folder (flock(2)).

    If another process holds it, ``waiting`` is called, and its end awaited; None: raises
    ``BlockingIOError``. Raises ``OSError`` without locks there.
    """
    with closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def write_atomic(
    path: Path,
    data: str | bytes,
    *,
    mode: int = 0o600,
    durable: bool = True,  # wait for the disk; else the file may be empty after a crash of the host
    progress: Callable[[int], None] = lambda count: None,  # bytes of each piece written
) -> None:
    """Write a file so that readers see either the old content or the complete new content."""
    whole = memoryview(data.encode() if isinstance(data, str) else data)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for begin in range(0, max(len(whole), 1), _PIECE_BYTES):
                piece = whole[begin : begin + _PIECE_BYTES]
                file.write(piece)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
                progress(len(piece))
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # write(2) and fsync(2) name none
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def create(path: Path, write: Callable[[Path], None], *, in_steps: bool = False) -> bool:
    """Create a file, which ``write`` writes, atomically; return False if it exists.

    Raises ``OSError`` on a file system without hard links; with ``in_steps`` the file is there
    before its content is.
    """
    mine = path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(4)}")
    write(mine)
    try:
        os.link(mine, path)
    except FileExistsError:
        # if NFS lost the answer, it repeats the call, which then fails: count the links
        return mine.stat().st_nlink == 2
    except OSError:
        if not in_steps:
            raise
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        write(path)
    finally:
        mine.unlink(missing_ok=True)
    return True


def open_folder(folder: Path) -> int:
    """Open a folder of a run; one that workers have made must not be a link (``OSError``)."""
    follow = 0 if not _INNER.fullmatch(folder.name) else os.O_NOFOLLOW
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | follow)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of a run. In the folders of workers it never follows a link, and never waits.

    Code in a container can write to those folders (:data:`WORKER_FOLDERS`): a link there, or a
    second name of a file that is to be changed, would lead to any file of the user's, and a pipe
    would make the reader wait. Such a thing counts as a missing file (``FileNotFoundError``).
    Nothing else opens files there. ``flags`` are those of open(2).
    """
    folder = path.parent
    inner, safe = _INNER.fullmatch(folder.name), os.O_NOFOLLOW | os.O_NONBLOCK
    if folder.name not in WORKER_FOLDERS and not inner:
        return os.open(path, flags, 0o600)
    try:
        if inner:
            with closing(open_folder(folder)) as above:
                descriptor = os.open(path.name, flags | safe, 0o600, dir_fd=above)
        else:
            descriptor = os.open(path, flags | safe, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # links; a pipe
            raise FileNotFoundError(errno.ENOENT, _PLANTED, str(path)) from None
        error.filename = str(path)
        raise
    status = os.fstat(descriptor)
    changed = flags & (os.O_WRONLY | os.O_RDWR)
    if not stat.S_ISREG(status.st_mode) or (changed and status.st_nlink > 1):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, _PLANTED, str(path))
    return descriptor


def opened(path: Path) -> BinaryIO:
    """Open a file of a run for reading; see :func:`open_file`."""
    return open(open_file(path), "rb")


@contextlib.contextmanager
def pinned(path: Path) -> Iterator[str]:
    """Give a name that means the file that :func:`open_file` opens, whatever the path becomes."""
    with opened(path) as file:
        yield f"/proc/self/fd/{file.fileno()}"


def write_json(path: Path, document: Any, *, durable: bool = True) -> None:
    """Write a JSON document as :func:`write_atomic` does."""
    write_atomic(path, json.dumps(document, indent=1) + "\n", durable=durable)


def overwrite_json(path: Path, document: Any, size_bytes: int = 256) -> None:
    """Write a small JSON document over the one before, in place: also when the disk is full.

    It is one write(2) of one size within one page, which readers do not see in part. On NFS, other
    hosts see it when they open the file again (nfs(5), "close-to-open").
    """
    with closing(open_file(path, os.O_WRONLY | os.O_CREAT)) as descriptor:
        os.pwrite(descriptor, json.dumps(document).encode().ljust(size_bytes - 1) + b"\n", 0)


def written_lately(path: Path, written: float, within_s: float) -> bool:
    """Whether another host has written a file within the last ``within_s`` seconds.

    ``written`` is Unix time by the writer's clock. Hosts' clocks may differ: if this host's clock
    denies it, the file system's clock decides.
    """
    if 0 <= time.time() - written < within_s:
        return True
    probe = path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(4)}")
    try:
        probe.touch(mode=0o600, exist_ok=False)
        now = probe.stat().st_mtime
        probe.unlink()
        return now - path.stat().st_mtime < within_s
    except OSError:  # another user's run, or an unavailable file system
        return False


def load_json(path: Path) -> Any:
    """Return a JSON document; raises ``OSError``, or ``DataError`` if it is not JSON."""
    with opened(path) as file:
        text = file.read(_DOCUMENT_BYTES + 1)
    try:
        if len(text) > _DOCUMENT_BYTES:
            raise ValueError(f"it has more than {_DOCUMENT_BYTES:,} bytes")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON: {error}") from None


def read_json(path: Path) -> Any | None:
    """Return a JSON document, or None without a file; raises ``DataError`` if it is not JSON."""
    tries = 3
    while True:
        tries -= 1
        try:
            return load_json(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            # NFS: another host replaced the file after it was opened here
            if error.errno != errno.ESTALE or not tries:
                raise


def peek_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that another process writes, or {} if it cannot be read now.

    For callers that poll: a file system may be unavailable for a moment.
    """
    try:
        document = read_json(path)
    except (OSError, DataError):
        return {}
    return document if isinstance(document, dict) else {}


def append_line(path: Path, document: dict[str, Any]) -> int:
    """Append a JSON line with one write(2), so lines do not mix; return the file's new size."""
    line = json.dumps(document, separators=(",", ":")) + "\n"
    with closing(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)) as descriptor:
        os.write(descriptor, line.encode())
        return os.lseek(descriptor, 0, os.SEEK_CUR)
