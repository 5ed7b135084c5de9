"""Key pairs of a run's workers: files that only their owner may read (docs/security.md).

``RUN/keys/MODULE.key`` holds a worker's pair, ``MODULE.pub`` its public key for its neighbours, in
Z85 (ZeroMQ RFC 32). Secrets appear in no argument, environment, log or record. Like ssh, the
runtime uses a key file only if no other user can have written or read it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from dni_runtime.errors import DataError, UnavailableError
from dni_runtime.files import closing, create, is_full, write_atomic
from dni_runtime.run.rundir import RunDir

_Z85_CHARS, _KEY_BYTES = 40, 32
_FILE_BYTES = 1024  # more than a key file ever has


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in Z85. Its ``repr`` does not show the secret."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        try:
            return cls(*zmq.curve_keypair())
        except zmq.ZMQError as error:
            raise UnavailableError(
                f"keys cannot be made: {error.strerror}",
                hint="install pyzmq with a libzmq that supports CURVE (its wheels do), or set "
                "'links.security: none'",
            ) from None


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """Keys in memory: of a launcher that keeps them itself, or for measurements."""

    pair: KeyPair
    publics: Mapping[str, bytes]  # by module

    def public(self, module: str) -> bytes | None:
        """Return a module's public key, or None if it is not known."""
        return self.publics.get(module)

    def leave(self) -> None:
        """Nothing stays behind."""

    @classmethod
    def read(cls, folder: Path, module: str) -> KnownKeys:
        """Read the keys in a folder whose files are not the worker's own, such as a Secret's.

        It has the files of ``RUN/keys`` that the worker needs. Who may read them is the launcher's
        concern: modes and owners are not checked.
        """
        own = folder / f"{module}.key"
        try:
            publics = {path.stem: path.read_bytes().strip() for path in folder.glob("*.pub")}
            return cls(_parsed(own, own.read_bytes()), publics)
        except OSError as error:
            raise DataError(
                f"the key file {str(own)!r} cannot be read: {error.strerror}",
                hint="--keys names a folder with the worker's own pair (MODULE.key)",
            ) from None


class RunKeys:
    """The keys of one worker in a run directory, read or made when first needed."""

    def __init__(self, run: RunDir, module: str) -> None:
        self._run = run
        self._module = module
        self._pair: KeyPair | None = None
        self._made = False

    @property
    def pair(self) -> KeyPair:
        """The worker's own pair; made here if the launcher made none."""
        if self._pair is None:
            self._made = make(self._run, self._module)
            self._pair = load(self._run, self._module)
        return self._pair

    def public(self, module: str) -> bytes | None:
        """Return a module's public key; see :func:`public`."""
        return public(self._run, module)

    def leave(self) -> None:
        """Remove the keys that this object made."""
        if self._made:
            remove(self._run, self._module)


Keyring = KnownKeys | RunKeys
"""Access of one worker to its run's keys."""


def make(run: RunDir, module: str) -> bool:
    """Make a module's key pair, unless it exists; return whether it was made here."""
    path = run.key(module)
    try:
        run.keys.mkdir(mode=0o700, exist_ok=True)
        made = not path.is_symlink() and not path.exists() and create(path, _write_pair)
        pair = load(run, module)
        if public(run, module) != pair.public:
            write_atomic(run.public_key(module), pair.public + b"\n")
    except OSError as error:
        if is_full(error):
            raise  # said as what it is
        raise DataError(
            f"keys cannot be made in {str(run.keys)!r}: {error.strerror}",
            hint="the run directory must lie on a file system with hard links and file modes",
        ) from None
    return made


def _write_pair(path: Path) -> None:
    pair = KeyPair.new()
    write_atomic(path, pair.public + b"\n" + pair.secret + b"\n")


def load(run: RunDir, module: str) -> KeyPair:
    """Read a module's own pair."""
    path = run.key(module)
    return _parsed(path, _read(path))


def _parsed(path: Path, content: bytes) -> KeyPair:
    lines = content.split(b"\n")
    if len(lines) != 3 or [len(line) for line in lines] != [_Z85_CHARS, _Z85_CHARS, 0]:
        raise _damaged(path)
    pair = KeyPair(lines[0], lines[1])
    try:
        if zmq.curve_public(pair.secret) != pair.public:
            raise _damaged(path)
    except zmq.ZMQError:
        raise _damaged(path) from None
    return pair


def public(run: RunDir, module: str) -> bytes | None:
    """Read a module's public key; None if there is none yet. Raises ``DataError`` if unsafe."""
    path = run.public_key(module)
    try:
        key = _read(path).removesuffix(b"\n")
    except FileNotFoundError:
        return None
    try:
        if len(z85.decode(key)) == _KEY_BYTES:
            return key
    except (KeyError, ValueError, struct.error):  # not Z85: its characters, length or value
        pass
    raise _damaged(path)


def remove(run: RunDir, module: str | None = None) -> None:
    """Remove a module's keys, or all keys; missing files are not an error."""
    with contextlib.suppress(OSError):
        paths = None if module is None else (run.key(module), run.public_key(module))
        for path in paths or run.keys.iterdir():
            path.unlink(missing_ok=True)
        run.keys.rmdir()


def _read(path: Path) -> bytes:
    """Return a key file's content, if no other user can have accessed it.

    Both the folder and the file are opened without following links, and checked after opening.
    """
    try:
        with closing(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as folder:
            _check(path.parent, os.fstat(folder))
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path.name, flags, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _unsafe(path, "is not a plain file")
            _check(path, status)
            return file.read(_FILE_BYTES)
    except FileNotFoundError:
        if path.suffix == ".pub":
            raise
        raise DataError(
            f"the key file {str(path)!r} is missing",
            hint="start the run with 'dnictl up' or 'dnictl resume', which make its keys",
        ) from None
    except OSError as error:
        raise _unsafe(path, f"cannot be opened as a plain file ({error.strerror})") from None


def _check(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _unsafe(path, f"belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o077:
        raise _unsafe(path, f"is open to others (mode {stat.S_IMODE(status.st_mode):04o})")


def _unsafe(path: Path, why: str) -> DataError:
    what = "key file" if path.suffix else "folder of keys"
    return DataError(
        f"the {what} {str(path)!r} is not used: it {why}",
        hint="stop the run, remove its folder 'keys' and resume it: it gets new keys",
    )


def _damaged(path: Path) -> DataError:
    return DataError(
        f"the key file {str(path)!r} is damaged",
        hint="stop the run, remove its folder 'keys' and resume it: it gets new keys",
    )
