"""The launch plan: how workers are started and restarted, as data (pure: it touches no machine).

The same plan is printed by ``--dry-run``, kept in the run directory and executed by a starter. Its
commands are rendered last (``schedulers/runtimes.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dni_runtime.errors import LASTING, DataError, UnansweredError, UnavailableError, UsageError
from dni_runtime.files import read_json
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.running import RestartSpec
from dni_runtime.worker.start import WorkerStart

Scope = Literal["module", "chain"]


class RestartPlan(RestartSpec):
    """A plan's rules for restarts (``restart`` in chain.yaml).

    The ``scope`` is the module that died, or the whole chain if a gradient interface waits for true
    gradients, which are lost with the module, or replicas form a process group, which does not
    survive the loss of a process.
    """

    policy: Literal["on-failure", "never"] = "never"
    snapshot_s: float = Field(default=0.0, exclude=True)  # the workers' specs have it
    scope: Scope = "module"


@dataclass
class Backoff:
    """Recent restarts of one module."""

    streak: int = 0  # consecutive restarts without ``healthy_s`` of uptime between
    attempt: int = 0  # the newest that has run; 0: none
    running_since_s: float | None = None  # None: its worker does not run
    # the error that ended it last, and its position in the stream then; None: a signal
    death: tuple[str, int] | None = None

    def repeats(self, error: str | None, id: int) -> bool:
        """Note what has ended a worker; return whether the same did at the same position before.

        What the same input does twice it will do a third time.
        """
        before, self.death = self.death, (error, id) if error else None
        return self.death is not None and self.death == before

    def runs(self, attempt: int, now_s: float) -> bool:
        """Note that the worker of an attempt runs; return whether that is news."""
        if attempt == self.attempt:
            return False
        self.attempt, self.running_since_s = attempt, now_s
        return True

    def stood_still(self, seconds: float) -> None:
        """Do not count the seconds in which a worker had stalled as uptime."""
        if self.running_since_s is not None:
            self.running_since_s += seconds

    def _streak(self, plan: RestartPlan, now_s: float) -> int:
        since_s = self.running_since_s
        return 0 if since_s is not None and now_s - since_s >= plan.healthy_s else self.streak

    def allows(self, plan: RestartPlan, exit_code: int, now_s: float) -> bool:
        """Whether the rules allow another restart; see :meth:`delay_s`."""
        # what was available once (an address, a driver, a neighbour) may be so again
        passing = (UnavailableError.exit_code, UnansweredError.exit_code)
        passes = self.attempt > 0 and exit_code in passing
        if plan.policy == "never" or (exit_code in LASTING and not passes):
            return False
        return self._streak(plan, now_s) < plan.limit

    def delay_s(self, plan: RestartPlan, exit_code: int, now_s: float) -> float | None:
        """Return the seconds until the restart; None if there is none.

        ``exit_code`` is as a shell reports it, ``now_s`` by the clock of ``running_since_s``.
        """
        allowed = self.allows(plan, exit_code, now_s)
        self.streak, self.running_since_s = self._streak(plan, now_s), None
        if not allowed:
            return None
        self.streak += 1
        # the exponent is limited: 2 to the power of a large limit overflows a float
        return float(min(plan.backoff_s * 2 ** min(self.streak - 1, 60), plan.backoff_max_s))


Backend = Literal["process", "apptainer"]

# Mount points inside the containers.
RUN_TARGET = "/dni/run"
DATA_TARGET = PurePosixPath("/dni/data")
SOCKETS_TARGET = "/dni/ipc"

AUTO = "auto"
"""``resume`` of a plan whose supervisor chooses the newest complete cut for all workers."""

_FORMAT = 3


@dataclass(frozen=True)
class Need:
    module: str
    cpus: int = 1
    gpus: int = 0
    memory_mib: int = 0
    cost: float = 1.0  # its share of the work, in the same unit for all modules


@dataclass(frozen=True)
class WorkerPlan(WorkerStart):
    """What one worker is told, and how it is started; paths are the host's.

    ``first`` is None if it has no supervisor.
    """

    log: str = ""  # file for its output
    # extends that of the starting process
    environment: dict[str, str] = field(default_factory=dict)
    python: str = "python3"  # on its host
    tool: Apptainer | None = None
    image: str | None = None  # path; None: no container
    mounts: tuple[Mount, ...] = ()  # folders of the host inside its container
    gpu: Literal["cuda", "rocm"] | None = None  # that its container gets
    container_args: tuple[str, ...] = ()  # further ones of the container program
    node: str | None = None  # the host that it runs on; None: this one
    overlaps: bool = False  # its step shares CPUs with others: the job has been resized
    need: Need | None = None  # its resources there
    scratch: str = ""  # folder for temporary files there, or empty
    scheduler_args: tuple[str, ...] = ()  # further ones of the scheduler's command

    def moved(self, node: str) -> WorkerPlan:
        """Return the plan of the worker on another node, where it listens on tcp.

        Its neighbours may be anywhere; those on its old node, linked by ipc, move as well.
        """
        transport = None if self.transport is None else "tcp"  # a head has no link from upstream
        return replace(self, node=node, transport=transport)

    def restarted(self, attempt: int, *, resume: str | None = None) -> WorkerPlan:
        """Return the plan of the worker's next start.

        ``resume`` is where the whole chain starts (``worker/resume.py``); None: only this worker
        restarts, at its own newest state.
        """
        log = str(RunDir(Path(self.run)).log(self.module, attempt))
        plan = replace(self, attempt=attempt, log=log)
        return plan if resume is None else replace(plan, resume=resume, first=attempt)


@dataclass(frozen=True)
class LaunchPlan:
    run: str  # the directory
    backend: Backend
    sockets: str  # folder, for ipc
    stop_grace_s: float  # that workers have to stop
    workers: tuple[WorkerPlan, ...]  # head first
    # names of the workers that each one takes its inputs from
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: bool = False  # workers need some, for links that may be encrypted
    restart: RestartPlan = field(default_factory=RestartPlan)
    scheduler: str = "local"  # what starts the workers (``schedulers/schedulers.py``)
    # modules whose number of replicas may change: that at the start
    elastic: dict[str, int] = field(default_factory=dict)
    auto: tuple[str, ...] = ()  # those of them whose number follows what balances the chain
    # of a chain that only predicts: what the process that serves it is told; nobody starts it
    front: WorkerPlan | None = None

    @property
    def nodes(self) -> dict[str, list[str]]:
        """The workers of each host that has a name here."""
        there: dict[str, list[str]] = {}
        for worker in self.workers:
            if worker.node is not None:
                there.setdefault(worker.node, []).append(worker.module)
        return there

    @property
    def resume(self) -> str:
        """Where the workers start, all at the same cut."""
        return self.workers[0].resume

    def to_json(self) -> dict[str, Any]:
        return {"format": _FORMAT, **_PLAN.dump_python(self, mode="json")}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LaunchPlan:
        if document.get("format") != _FORMAT:
            raise DataError(
                "not a launch plan of this version of dni-runtime",
                hint="'dnictl resume' makes a new one",
            )
        try:
            return _PLAN.validate_python(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DataError(f"not a launch plan: {where}: {first['msg']}") from None

    @classmethod
    def read(cls, run: RunDir) -> LaunchPlan:
        document = read_json(run.plan)
        if document is None:
            raise UsageError(f"{str(run.root)!r} holds no launch plan")
        return cls.from_json(document)


_PLAN = TypeAdapter(LaunchPlan)
