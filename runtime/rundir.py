"""The run directory: the one module that defines the paths of a run's files.

::

    RUN/
      run.json                      what was started, from what, when
      chain.yaml  chain.json        the chain as written, and resolved
      plan.json                     the launch plan
      job.json  job.sbatch          the Slurm job: what was requested, and its batch script
      specs/MODULE.json             what each worker serves
      src/                          the user's source files
      endpoints/MODULE.json         where a worker listens, its public key (published atomically)
      endpoints/MODULE.group/       how replicas find each other that form a process group
      keys/MODULE.key  .pub         a worker's key pair, its public key; only while it is needed
      workers/MODULE.json           a worker's own state
      state.json  events.jsonl      the supervisor's state and history
      owner.json  leases/           which supervisor the run belongs to, and who took it over
      stop.json                     the request to stop the run
      logs/MODULE.ATTEMPT.log       what a worker printed
      logs/supervisor.log           what a detached supervisor printed
      metrics/MODULE.jsonl          what a worker measured: the whole curve
      metrics/recent/MODULE.jsonl   the newest lines of a long run, unthinned; .1: those before
      tensorboard/MODULE/           the same as event files, on request
      initial/MODULE.safetensors    a module's initial weights, if the chain specifies any
      checkpoints/ID/MODULE.*       consistent cuts, by position in the stream
      checkpoints/best.json         which checkpoint is the best, if the chain selects one
      snapshots/MODULE.safetensors  a module's own newest state, for its restart
      ledger/MODULE.json            what a module has processed, over all its attempts
      ledger/MODULE.marks.jsonl     requested markers that the head inserted, by position
      ledger/replicas.json          which replicas are to take batches, for the head
      scale.json                    how many replicas of its modules 'dnictl scale' wants
      requests/restart-MODULE       a request to restart a module
      control/MODULE.json           what the supervisor wants of a worker
      container/                    the run directory as containers see it; the files and folders
                                    that they need are mounted into it

A run directory may lie on a shared file system: files appear whole (temporary name, then rename)
and nothing relies on locks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dni_runtime.errors import DataError

FOLDERS = (
    *("specs", "src", "endpoints", "workers", "logs", "metrics"),
    *("metrics/recent", "initial", "checkpoints", "snapshots", "ledger", "requests", "control"),
)

WORKER_FOLDERS = ("endpoints", "workers", "metrics", "checkpoints", "snapshots", "ledger")
"""Folders that workers write to; nothing in them is executed or decides what is executed."""

_INNER = re.compile(r"\d{12}|recent|.+\.group")
"""Folders within those: of a cut, of metrics' newest lines, of a process group."""

_RESTART = "restart-"
_PLANTED = "it is a link, or no plain file, and is not used"
_IN_PLACE_BYTES = 256
_PIECE_BYTES = 64 << 20  # of a large file: how much is on disk shows progress


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    root: Path

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def chain_file(self) -> Path:
        return self.root / "chain.yaml"

    @property
    def chain(self) -> Path:
        return self.root / "chain.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def script(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def owner(self) -> Path:
        return self.root / "owner.json"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    def taken(self, token: str) -> Path:
        """Exists if the run has been taken over from the owner with this token."""
        return self.leases / f"{token}.taken"

    def beats(self, token: str) -> Path:
        """The heartbeat counter of the owner with this token."""
        return self.leases / f"{token}.beats"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def stop_request(self) -> Path:
        return self.root / "stop.json"

    @property
    def supervisor_log(self) -> Path:
        return self.root / "logs" / "supervisor.log"

    @property
    def sources(self) -> Path:
        return self.root / "src"

    def initial(self, module: str) -> Path:
        return self.root / "initial" / f"{module}.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def best(self) -> Path:
        old = self.root / "best.json"  # runs of earlier versions
        return old if old.exists() else self.checkpoints / "best.json"

    def marks(self, module: str) -> Path:
        return self.root / "ledger" / f"{module}.marks.jsonl"

    def shares(self, module: str) -> Path:
        return self.root / "ledger" / f"{module}.shares.jsonl"

    @property
    def replicas(self) -> Path:
        return self.root / "ledger" / "replicas.json"

    @property
    def scale(self) -> Path:
        return self.root / "scale.json"

    @property
    def requests(self) -> Path:
        return self.root / "requests"

    def restart_request(self, module: str) -> Path:
        return self.requests / f"{_RESTART}{module}"

    def wanted_restarts(self) -> list[str]:
        """Modules with a restart request; requests still being written are left out."""
        return [path.name.removeprefix(_RESTART) for path in self.requests.glob(f"{_RESTART}*")]

    @property
    def controls(self) -> Path:
        return self.root / "control"

    def control(self, module: str) -> Path:
        return self.controls / f"{module}.json"

    def snapshot(self, module: str) -> Path:
        return self.root / "snapshots" / f"{module}.safetensors"

    def ledger(self, module: str) -> Path:
        return self.root / "ledger" / f"{module}.json"

    def spec(self, module: str) -> Path:
        return self.root / "specs" / f"{module}.json"

    def endpoint(self, module: str) -> Path:
        return self.root / "endpoints" / f"{module}.json"

    def group(self, module: str) -> Path:
        return self.root / "endpoints" / f"{module}.group"

    @property
    def groups(self) -> list[Path]:
        return [*(self.root / "endpoints").glob("*.group")]

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    def key(self, module: str) -> Path:
        return self.keys / f"{module}.key"

    def public_key(self, module: str) -> Path:
        return self.keys / f"{module}.pub"

    def worker(self, module: str) -> Path:
        return self.root / "workers" / f"{module}.json"

    def log(self, module: str, attempt: int) -> Path:
        return self.root / "logs" / f"{module}.{attempt}.log"

    def metrics(self, module: str) -> Path:
        return self.root / "metrics" / f"{module}.jsonl"

    def recent_metrics(self, module: str) -> Path:
        return self.root / "metrics" / "recent" / f"{module}.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def checkpoint(self, cut: int, module: str) -> Path:
        """Path, without suffix, of one module's part of the checkpoint at position ``cut``."""
        return self.checkpoints / f"{cut:012d}" / module

    @property
    def container(self) -> RunDir:
        """The directory that containers see in its place: empty except for mounts."""
        return RunDir(self.root / "container")

    def create(self) -> None:
        """Create the folders, readable by their owner only."""
        for folder in FOLDERS:
            (self.root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(self.root.stat().st_mode) != 0o700:  # in a container it cannot be changed
            self.root.chmod(0o700)
        if (old := self.root / "best.json").exists():
            old.replace(self.checkpoints / "best.json")


def socket_path(run: Path, base: Path | None = None) -> Path:
    """Return the folder of the run's ipc sockets: short (unix(7): 107 bytes), local, private."""
    if base is None:
        base = _socket_base()
    return base / f"dni-{hash_name(f'{os.getuid()}:{run.resolve()}')}"


def _socket_base() -> Path:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    # systemd removes its folder at logout (user-runtime-dir(5)); a run may outlive the login
    if base.is_relative_to("/run/user") or not os.access(base, os.W_OK | os.X_OK):
        base = Path("/tmp")
    return base


def socket_folder(run: Path, folder: Path | None = None) -> Path:
    """Create the folder for the run's sockets, by default :func:`socket_path`.

    Raises:
        DataError: The folder belongs to another user.
    """
    folder = folder or socket_path(run)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DataError(
            f"the socket folder {str(folder)!r} belongs to another user or is open to others",
            hint="remove it, or set XDG_RUNTIME_DIR to a private folder",
        )
    return folder


def hash_name(text: str) -> str:
    """Return twelve hexadecimal digits that identify ``text``."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_atomic(
    path: Path,
    data: str | bytes,
    *,
    mode: int = 0o600,
    durable: bool = True,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a file so that readers see either the old content or the complete new content.

    Args:
        path: The file.
        data: Its content.
        mode: Its permissions.
        durable: Wait until it is on disk. Otherwise the file may be empty after the host crashes,
            but the calling thread does not wait for the disk.
        progress: Told of each piece that is on disk, in bytes.
    """
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


def open_folder(folder: Path) -> int:
    """Open a folder of a run; one that workers have made is not followed if it is a link.

    Raises:
        OSError: It is a link, or no folder.
    """
    follow = 0 if not _INNER.fullmatch(folder.name) else os.O_NOFOLLOW
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | follow)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of a run. In the folders of workers it never follows a link, and never waits.

    Code in a container can write to those folders (:data:`WORKER_FOLDERS`): a link there, or a
    second name of a file that is to be changed, would lead to any file of the user's, and a pipe
    would make the reader wait. Nothing else opens files there.

    Args:
        path: The file.
        flags: As of open(2).

    Raises:
        FileNotFoundError: It is missing, or something of these is in its place.
    """
    folder = path.parent
    inner, safe = _INNER.fullmatch(folder.name), os.O_NOFOLLOW | os.O_NONBLOCK
    if folder.name not in WORKER_FOLDERS and not inner:
        return os.open(path, flags, 0o600)
    try:
        if inner:
            above = open_folder(folder)
            try:
                descriptor = os.open(path.name, flags | safe, 0o600, dir_fd=above)
            finally:
                os.close(above)
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


def overwrite_json(path: Path, document: Any) -> None:
    """Write a small JSON document over the one before, in place: also when the disk is full.

    It is one write(2) of one size within one page, which readers do not see in part. On NFS, other
    hosts see it when they open the file again (nfs(5), "close-to-open").
    """
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, json.dumps(document).encode().ljust(_IN_PLACE_BYTES - 1) + b"\n", 0)
    finally:
        os.close(descriptor)


def written_lately(path: Path, written: float, within_s: float) -> bool:
    """Whether another host has written a file within the last ``within_s`` seconds.

    Hosts' clocks may differ: if this host's clock denies it, the file system's clock decides.

    Args:
        path: The file.
        written: Time of writing by the writer's clock (Unix time).
        within_s: Age limit in seconds.
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


def read_json(path: Path) -> Any | None:
    """Return a JSON document, or None if the file does not exist (yet).

    Raises:
        DataError: The file is not JSON.
    """
    tries = 3
    while True:
        tries -= 1
        try:
            with opened(path) as file:
                return json.loads(file.read())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{str(path)!r} is not JSON: {error}") from None
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
    """Append one JSON line with one write(2) to an O_APPEND file, so lines do not mix.

    Returns:
        The file's new size.
    """
    line = json.dumps(document, separators=(",", ":")) + "\n"
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
        return os.lseek(descriptor, 0, os.SEEK_CUR)
    finally:
        os.close(descriptor)
