"""The run directory: the one module that defines the paths of a run's files.

::

    RUN/
      run.json                      what was started, from what, when
      chain.yaml  chain.json        the chain as written, and resolved
      plan.json                     the launch plan
      job.json  job.sbatch          the Slurm job: what was requested, and its batch script
      specs/MODULE.json             what each worker serves
      front.json                    what the front answers, if a launcher starts it as well
      src/                          the user's source files
      endpoints/MODULE.json         where a worker listens, its public key (published atomically)
      endpoints/MODULE.group/       how replicas find each other that form a process group
      keys/MODULE.key  .pub         a worker's key pair, its public key; only while it is needed
      workers/MODULE.json           a worker's own state
      state.json  events.jsonl      the supervisor's state and history
      end.json                      how the run has ended, if state.json has no room for it
      owner.json  leases/           which supervisor the run belongs to, and who took it over
      stop.json                     the request to stop the run
      logs/MODULE.ATTEMPT.log       what a worker printed
      logs/supervisor.log           what a detached supervisor printed
      metrics/MODULE.jsonl          what a worker measured: the whole curve
      tensorboard/MODULE/           the same as event files, on request
      initial/MODULE.safetensors    a module's initial weights, if the chain specifies any
      exits/exits.json              early exits: figures, and who leaves where
      exits/MODULE.safetensors      a module's early head
      checkpoints/ID/MODULE.*       consistent cuts, by position in the stream
      checkpoints/best.json         which checkpoint is the best, if the chain selects one
      snapshots/MODULE.safetensors  a module's own newest state, for its restart
      snapshots/MODULE.trying       the batch that a worker which predicts may die of
      ledger/MODULE.json            what a module has processed, over all its attempts
      ledger/MODULE.marks.jsonl     requested markers that the head inserted, by position
      ledger/MODULE.shares.jsonl    a replica's parts of evaluations, at the tail
      scale.json                    how many replicas of its modules 'dnictl scale' wants
      requests/restart-MODULE       a request to restart a module
      control/MODULE.json           what the supervisor wants of a worker
      container/                    the run directory as containers see it; the files and folders
                                    that they need are mounted into it

A run directory may lie on a shared file system: files appear whole (temporary name, then rename)
and nothing relies on locks.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dni_runtime.errors import DataError

FOLDERS = (
    *("specs", "src", "endpoints", "workers", "logs", "metrics"),
    *("initial", "checkpoints", "snapshots", "ledger", "requests", "control"),
)

ENTRIES = frozenset({
    *FOLDERS, "keys", "leases", "tensorboard", "container", "exits",
    "run.json", "chain.yaml", "chain.json", "plan.json", "job.json", "job.sbatch", "state.json",
    "events.jsonl", "told.json", "end.json", "owner.json", "stop.json", "scale.json",
    "front.json",
})  # fmt: skip
"""All that a run directory may hold: what else is in it is somebody's own."""

_RESTART = "restart-"


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
    def front(self) -> Path:
        return self.root / "front.json"

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
    def end(self) -> Path:
        return self.root / "end.json"

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
    def told(self) -> Path:
        """What the run's callbacks have been told."""
        return self.root / "told.json"

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
    def exits(self) -> Path:
        return self.root / "exits" / "exits.json"

    def exit_head(self, module: str) -> Path:
        return self.root / "exits" / f"{module}.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.json"

    def marks(self, module: str) -> Path:
        return self.root / "ledger" / f"{module}.marks.jsonl"

    def shares(self, module: str) -> Path:
        return self.root / "ledger" / f"{module}.shares.jsonl"

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

    def trying(self, module: str) -> Path:
        """The batch that a restarted worker is computing, and how often one has begun it."""
        return self.root / "snapshots" / f"{module}.trying"

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
