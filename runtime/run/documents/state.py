"""The state of a run (``state.json``): its supervisor writes it, other commands read it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, SkipValidation

from dni_runtime.errors import StoppedError
from dni_runtime.files import overwrite_json, peek_json, write_json, written_lately
from dni_runtime.run.cuts import NOT_OVER, is_over
from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.reports import ENDED, Report, WorkerPhase
from dni_runtime.run.rundir import RunDir

RunPhase = Literal[
    "new", "queued", "starting", "running", "stalled", "stopping", "unsupervised",
    "finished", "stopped", "failed", "lost",
]  # fmt: skip

ACTIVE: frozenset[RunPhase] = frozenset(
    {"queued", "starting", "running", "stalled", "stopping", "unsupervised"}
)
COMING = ("restarting", "starting", "connecting")
"""A worker's phases before its links are open."""

HEARTBEAT_S = 10.0
_SILENCE_S = 90.0  # attribute caches of shared file systems show changes late

_END = ("attempt", "phase", "exit_code", "ended", "failed", "error")
_ERROR, _END_BYTES = 500, 3500  # characters, of at most six bytes in JSON; within one page


class ModuleState(Document):
    model_config = ConfigDict(frozen=False)

    state: Annotated[WorkerPhase, SkipValidation] = "new"  # while it runs, as it reports itself
    attempt: int = 0  # number of this start of the module
    pid: int | None = None  # in containers: of the process that watches it
    born: int | None = None  # start time of that process; see :class:`RunState`
    exit_code: int | None = None  # as a shell reports it (128 + n after signal n); None: it runs
    signal: str | None = None  # name of the signal that killed it
    log: str = ""
    restarts: int = 0  # of the module in this attempt of the run


class RunState(Document):
    model_config = ConfigDict(frozen=False)

    format: int = 1
    # Three phases are never written but found by readers: ``unsupervised`` and ``lost`` (the
    # supervisor is gone, with or without running workers) and ``queued`` (the job waits,
    # ``launch.slurm.job``).
    phase: Annotated[RunPhase, SkipValidation] = "new"
    attempt: int = 0  # number of this start of the run, from 1
    backend: str = ""  # of the workers
    pid: int = 0  # the supervisor's
    host: str = ""  # its host
    machine: str = ""  # what numbers processes there (:func:`machine`): hosts may have one name
    # Start time of that process (proc(5), starttime): a process id alone may be reused.
    born: int | None = None
    started: float = 0.0  # Unix time of this attempt's start
    updated: float = 0.0  # Unix time of the supervisor's last write
    ended: float | None = None  # Unix time
    exit_code: int | None = None  # of the supervisor
    failed: str | None = None  # the module that failed first
    error: str | None = None  # what went wrong, or why the run has stalled
    modules: dict[str, ModuleState]  # the workers, head first
    # How many replicas are asked for of each module whose number of them may change.
    scale: dict[str, int] = Field(default_factory=dict)
    restart_reason: str | None = None  # why all workers restart together once they have stopped

    @classmethod
    def begin(cls, backend: str, attempt: int, modules: Iterable[str]) -> Self:
        """Return the state of a run that this process is about to start."""
        now = time.time()
        return cls(
            phase="starting",
            attempt=attempt,
            backend=backend,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=machine(),
            born=process_birth(os.getpid()),
            started=now,
            updated=now,
            modules={name: ModuleState(attempt=attempt) for name in modules},
        )

    def taken_over(self) -> Self:
        """Return the state with this process as the supervisor of the running workers."""
        mine = self.begin(self.backend, self.attempt, self.modules)
        kept = ("started", "modules", "scale", "restart_reason")
        return mine.model_copy(update={name: getattr(self, name) for name in kept})

    @property
    def active(self) -> bool:
        """Whether the run has not ended."""
        return self.phase in ACTIVE

    @property
    def here(self) -> bool:
        """Whether this process sees those of the run."""
        return self.host == socket.gethostname() and self.machine in ("", machine())

    @property
    def last_attempt(self) -> int:
        """The highest attempt of any module."""
        return max([self.attempt, *(module.attempt for module in self.modules.values())])

    def save(self, run: RunDir) -> None:
        """Write the state to the run directory; of the run's end at least the most important."""
        self.updated = time.time()
        document = self.model_dump(mode="json")
        try:
            write_json(run.state, document)
        except OSError:
            if self.ended is not None:
                end = {name: document[name] for name in _END}
                overwrite_json(run.end, end | {"error": (self.error or "")[:_ERROR]}, _END_BYTES)
            raise
        if self.backend == "apptainer":
            write_json(run.container.state, document, durable=False)

    @classmethod
    def keep_room_for_end(cls, run: RunDir) -> None:
        """Make the file that has the run's end if the disk is full then."""
        overwrite_json(run.end, {}, _END_BYTES)

    @classmethod
    def read(cls, run: RunDir) -> Self:
        """Read the state; if the supervisor is gone, derive it from the workers' reports."""
        state = cls.load(run.state) or cls(modules={})
        if state.active and not state._supervised(run):
            state = cls.load(run.state) or state  # its supervisor may have written it since
        if state.active and not state._supervised(run):
            state._ask_workers(run)
            end = peek_json(run.end)
            if end.get("attempt") == state.attempt and state.phase != "unsupervised":
                state = state.model_copy(update={name: end[name] for name in _END})
        return state

    def _ask_workers(self, run: RunDir) -> None:
        """Derive the phase of a run without a supervisor from the workers' reports."""
        going_on = lately = False
        workers = peek_json(run.plan).get("workers", ())
        planned = {worker["module"]: worker["attempt"] for worker in workers}
        for name, module in self.modules.items():
            if planned.get(name, 0) > module.attempt:  # it may have been started since
                module.attempt, module.pid = planned[name], None
            report = Report.read(run.worker(name))
            if report.of(module.attempt):
                module.state = report.state
                if module.pid is None and report.host == socket.gethostname():
                    module.pid, module.born = report.pid, report.born
            seen = written_lately(run.worker(name), report.time, _SILENCE_S)
            lately = lately or seen
            if lives(module) if self.here else seen and module.state not in ENDED:
                going_on = True
            elif module.state not in ENDED:
                module.state = "failed"
        states = {module.state for module in self.modules.values()} - {"inactive"}
        whole = states == {"finished"} and is_over(run, list(self.modules))
        if going_on or (states == {"finished"} and not whole and lately):  # a part may show late
            self.phase = "unsupervised"
        elif whole:
            self.phase, self.exit_code = "finished", 0
        elif states <= {"finished", "stopped"}:
            self.phase, self.exit_code = "stopped", StoppedError.exit_code
            if states == {"finished"}:
                self.error = NOT_OVER
        else:
            self.phase = "lost"

    def _supervised(self, run: RunDir) -> bool:
        if self.here:
            return self.born is None or process_birth(self.pid) == self.born
        return written_lately(run.state, self.updated, _SILENCE_S)


def lives(module: ModuleState) -> bool:
    """Return whether a worker's process exists on this host."""
    return module.pid is not None and process_birth(module.pid) == (module.born or -1)


def machine() -> str:
    """Return what process ids refer to: a boot of a host (proc(5), boot_id), a PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def process_birth(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None if it is gone (or no /proc)."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else int(stat[19])  # a zombie has ended


def _stat(pid: int) -> list[str] | None:
    """Return fields 3 and up of proc(5)'s stat; the second, a bracketed name, may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def shell_status(code: int) -> tuple[int, str | None]:
    """Return a shell's exit code, and the name of the signal that killed the process.

    ``code`` is an exit code, a shell's 128 + n, or minus the signal.
    """
    number = -code if code < 0 else code - 128
    if not 0 < number < signal.NSIG:
        return code, None
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return 128 + number, name
