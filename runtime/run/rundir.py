"""The run directory: the one module that defines the paths of a run's files.

A run directory may lie on a shared file system: files appear whole (temporary name, then rename)
and nothing relies on locks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dni_runtime.errors import DataError

FOLDERS = (
    *("specs", "src", "endpoints", "workers", "logs", "metrics"),
    *("initial", "checkpoints", "snapshots", "ledger", "requests", "control"),
)
"""Those that each run has."""

_RESTART = "restart-"


@dataclass(frozen=True)
class _File:
    """A path below the run directory."""

    path: str

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.root / self.path


@dataclass(frozen=True)
class _Files:
    """The same of each module, or of another name: it is called with that."""

    path: str

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Callable[[str], Path]:
        return lambda name: run.root / self.path.format(name)


@dataclass(frozen=True)
class RunDir:
    root: Path

    record = _File("run.json")  # what was started, from what, when
    chain_file = _File("chain.yaml")  # the chain as written
    chain = _File("chain.json")  # resolved
    plan = _File("plan.json")  # the launch plan
    job = _File("job.json")  # the Slurm job: what was requested
    script = _File("job.sbatch")  # its batch script
    spec = _Files("specs/{}.json")  # what each worker serves
    front = _File("front.json")  # what the front answers, if a launcher starts it as well
    sources = _File("src")  # the user's source files
    # Where a worker listens, its public key; published atomically.
    endpoint = _Files("endpoints/{}.json")
    group = _Files("endpoints/{}.group")  # how replicas find each other that form a process group
    keys = _File("keys")
    key = _Files("keys/{}.key")  # a worker's key pair; only while it is needed
    public_key = _Files("keys/{}.pub")
    worker = _Files("workers/{}.json")  # a worker's own state
    state = _File("state.json")  # the supervisor's
    events = _File("events.jsonl")  # its history
    end = _File("end.json")  # how the run has ended, if state.json has no room for it
    told = _File("told.json")  # what the run's callbacks have been told
    owner = _File("owner.json")  # which supervisor the run belongs to
    leases = _File("leases")
    taken = _Files("leases/{}.taken")  # the run was taken over from the owner with this token
    beats = _Files("leases/{}.beats")  # the heartbeat counter of that owner
    stop_request = _File("stop.json")
    supervisor_log = _File("logs/supervisor.log")  # what a detached supervisor printed
    metrics = _Files("metrics/{}.jsonl")  # what a worker measured: the whole curve
    tensorboard = _File("tensorboard")  # the same as event files, on request, by module
    initial = _Files("initial/{}.safetensors")  # initial weights, if the chain specifies any
    exits = _File("exits/exits.json")  # early exits: figures, and who leaves where
    exit_head = _Files("exits/{}.safetensors")
    checkpoints = _File("checkpoints")
    best = _File("checkpoints/best.json")  # which is the best, if the chain selects one
    snapshot = _Files("snapshots/{}.safetensors")  # a module's own newest state, for its restart
    # What a restarted worker computes, or has died of: batches, and how often each was begun.
    trying = _Files("snapshots/{}.trying")
    ledger = _Files("ledger/{}.json")  # what a module has processed, over all its attempts
    marks = _Files("ledger/{}.marks.jsonl")  # requested markers that the head has inserted
    shares = _Files("ledger/{}.shares.jsonl")  # a replica's parts of evaluations, at the tail
    scale = _File("scale.json")  # how many replicas of its modules 'dnictl scale' wants
    requests = _File("requests")
    restart_request = _Files(f"requests/{_RESTART}{{}}")
    controls = _File("control")
    control = _Files("control/{}.json")  # what the supervisor wants of a worker
    _container = _File("container")

    def log(self, module: str, attempt: int) -> Path:
        """What a worker printed."""
        return self.root / "logs" / f"{module}.{attempt}.log"

    def checkpoint(self, cut: int, module: str) -> Path:
        """Path, without suffix, of one module's part of the checkpoint at position ``cut``."""
        return self.checkpoints / f"{cut:012d}" / module

    @property
    def container(self) -> RunDir:
        """The directory that containers see in its place: empty except for mounts."""
        return RunDir(self._container)

    @property
    def source_files(self) -> dict[str, Path]:
        """The user's source files, by their path relative to an import root."""
        files = (path for path in self.sources.rglob("*") if path.is_file())
        return {str(path.relative_to(self.sources)): path for path in files}

    @property
    def groups(self) -> list[Path]:
        return [*(self.root / "endpoints").glob("*.group")]

    def wanted_restarts(self) -> list[str]:
        """Modules with a restart request; requests still being written are left out."""
        return [path.name.removeprefix(_RESTART) for path in self.requests.glob(f"{_RESTART}*")]

    def create(self) -> None:
        """Create the folders, readable by their owner only."""
        for folder in FOLDERS:
            (self.root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(self.root.stat().st_mode) != 0o700:  # in a container it cannot be changed
            self.root.chmod(0o700)


ENTRIES = frozenset(
    Path(file.path).parts[0] for file in vars(RunDir).values() if isinstance(file, _File | _Files)
)
"""All that a run directory may hold: what else is in it is somebody's own."""


def socket_path(run: Path, base: Path | None = None) -> Path:
    """Return the folder of the run's ipc sockets: short (unix(7): 107 bytes), local, private."""
    return (base or _socket_base()) / f"dni-{hash_name(f'{os.getuid()}:{run.resolve()}')}"


def _socket_base() -> Path:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    # systemd removes its folder at logout (user-runtime-dir(5)); a run may outlive the login
    if base.is_relative_to("/run/user") or not os.access(base, os.W_OK | os.X_OK):
        base = Path("/tmp")
    return base


def socket_folder(run: Path, folder: Path | None = None) -> Path:
    """Create the folder for the run's sockets, by default :func:`socket_path`; it is private."""
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
