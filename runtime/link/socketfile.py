"""Files of ``ipc://`` sockets: libzmq overwrites existing files and does not remove its own."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from dni_runtime.errors import UnavailableError

PATH_BYTES = 107
"""unix(7): ``sun_path`` has 108 bytes with the closing zero."""


def check(path: Path) -> None:
    """Check that a Unix socket can be made here; a dead process's file is no obstacle.

    libzmq removes whatever lies at the path, so this must run first. Raises ``UnavailableError`` if
    the path is too long, its folder is missing, or it exists and is not a socket that a dead
    process of this user left.
    """
    if len(os.fsencode(path)) > PATH_BYTES:
        raise UnavailableError(
            f"the socket's path {str(path)!r} is longer than {PATH_BYTES} bytes",
            hint="set XDG_RUNTIME_DIR to a folder with a shorter path",
        )
    try:
        status = path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UnavailableError(f"the socket folder {str(path.parent)!r} is missing") from None
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise UnavailableError(
            f"{str(path)!r} is in the way: it is not a socket of this user", hint="remove it"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # a full backlog (EAGAIN) means that it is alive, too
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise UnavailableError(
                f"another process listens on {str(path)!r}",
                hint="a worker of this run is still alive: see 'dnictl ps', end it with "
                "'dnictl stop'",
            )


def file_id(address: str) -> tuple[int, int] | None:
    """Return what identifies an ipc address's file: device and inode; None if there is none."""
    if not address.startswith("ipc://"):
        return None
    try:
        status = os.lstat(address.removeprefix("ipc://"))
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def remove(address: str, mine: tuple[int, int] | None) -> None:
    """Remove an ipc address's file, unless another process has replaced it."""
    if mine is not None and file_id(address) == mine:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.removeprefix("ipc://"))
