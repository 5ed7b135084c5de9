"""The launch plan: how workers are started, as data (pure; nothing here touches the machine).

The same plan is printed by ``--dry-run``, kept in the run directory and executed by a starter. Its
commands are rendered last (``launch/runtimes.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from dni_runtime.errors import DataError, UsageError
from dni_runtime.files import read_json
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.launch.restarts import RestartPlan
from dni_runtime.rundir import RunDir
from dni_runtime.spec.members import Active

Backend = Literal["process", "apptainer"]

# Mount points inside the containers.
RUN_TARGET = "/dni/run"
DATA_TARGET = PurePosixPath("/dni/data")
SOCKETS_TARGET = "/dni/ipc"

AUTO = "auto"
"""``resume`` of a plan whose supervisor chooses the newest complete cut for all workers."""

_FORMAT = 2  # 1 held commands instead of fields


@dataclass(frozen=True)
class Need:
    """The resources that one module needs.

    Attributes:
        module: Its name.
        cpus: Processors.
        gpus: GPUs.
        memory_mib: Memory in MiB.
        cost: Its share of the work, in the same unit for all modules.
    """

    module: str
    cpus: int = 1
    gpus: int = 0
    memory_mib: int = 0
    cost: float = 1.0


@dataclass(frozen=True)
class WorkerPlan:
    """How one worker is started; paths are the host's.

    Attributes:
        module: The module that it serves.
        attempt: Number of this start of the module, from 1.
        run: The run directory.
        sockets: Folder of the run's ipc sockets.
        log: File for its output.
        resume: Where it starts: ``auto``, ``none`` or the stream position of a checkpoint.
        first: Its attempt when the whole chain was last started; None without a supervisor.
        log_level: Its log level.
        data: Folder or file of the data or the labels that it reads, or None.
        transport: Transport of its link from upstream, if it differs from the chain's.
        interface: Interface of that link, if it differs from the chain's.
        environment: Variables that extend the starting process's environment.
        backend: Its container runtime (``launch/runtimes.py``).
        python: The interpreter on its host.
        tool: The container program, for containers.
        image: Path of its image, or None without a container.
        mounts: Folders of the host inside its container.
        gpu: The kind of GPU that its container gets, or None.
        container_args: Further arguments of the container program.
        prefix: A command that executes the worker's command, such as ``nsenter``.
        node: The host that it runs on, or None for this one.
        gained: Whether that host has come to the job later.
        need: Its resources there.
        scratch: Folder for temporary files there, or an empty string.
        scheduler_args: Further arguments of the scheduler's command.
        by_rank: Whether the worker finds its module by its rank (``worker/rank.py``).
        active: The replicas that take batches when it starts, of each elastic module.
    """

    module: str
    attempt: int
    run: str
    sockets: str
    log: str
    resume: str = AUTO
    first: int | None = None
    log_level: str = "info"
    data: str | None = None
    transport: str | None = None
    interface: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    backend: Backend = "process"
    python: str = "python3"
    tool: Apptainer | None = None
    image: str | None = None
    mounts: tuple[Mount, ...] = ()
    gpu: Literal["cuda", "rocm"] | None = None
    container_args: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    node: str | None = None
    gained: bool = False
    need: Need | None = None
    scratch: str = ""
    scheduler_args: tuple[str, ...] = ()
    by_rank: bool = False
    active: Active | None = None

    def moved(self, node: str, *, gained: bool = False) -> WorkerPlan:
        """Return the plan of the worker on another node, where it listens on tcp.

        Its neighbours may be anywhere; those on its old node, linked by ipc, move as well.

        Args:
            node: The node.
            gained: Whether the job has gained it.
        """
        transport = None if self.transport is None else "tcp"  # a head has no link from upstream
        return replace(self, node=node, gained=gained, transport=transport)

    def again(self, attempt: int, *, resume: str | None = None) -> WorkerPlan:
        """Return the plan of the worker's next start.

        Args:
            attempt: Number of that start of the module.
            resume: Where the whole chain starts (``worker/resume.py``); None: only this worker
                restarts, at its own newest state if it has joined the stream.
        """
        log = str(RunDir(Path(self.run)).log(self.module, attempt))
        plan = replace(self, attempt=attempt, log=log)
        return plan if resume is None else replace(plan, resume=resume, first=attempt)


@dataclass(frozen=True)
class LaunchPlan:
    """How a run's workers are started.

    Attributes:
        run: The run directory.
        backend: Backend of the workers.
        sockets: Folder of the run's ipc sockets.
        stop_grace_s: Seconds that workers have to stop.
        workers: The workers, head first.
        sources: Names of the workers that each one takes its inputs from.
        keys: Whether the workers need keys, for links that may be encrypted.
        restart: Rules for restarts of dead workers.
        scheduler: What starts the workers (``launch/schedulers.py``).
        elastic: The modules whose number of replicas may change, each with that at the start.
        auto: Those of them whose number follows what balances the chain.
    """

    run: str
    backend: Backend
    sockets: str
    stop_grace_s: float
    workers: tuple[WorkerPlan, ...]
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: bool = False
    restart: RestartPlan = field(default_factory=RestartPlan)
    scheduler: str = "local"
    elastic: dict[str, int] = field(default_factory=dict)
    auto: tuple[str, ...] = ()

    @property
    def resume(self) -> str:
        """Where the workers start, all at the same cut."""
        return self.workers[0].resume

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        return {"format": _FORMAT, **_PLAN.dump_python(self, mode="json")}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LaunchPlan:
        """Return the plan in a document of :meth:`to_json`.

        Raises:
            DataError: The document is not a plan, or one of another version.
        """
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
        """Return the plan in a run directory.

        Raises:
            UsageError: There is none.
            DataError: It is not a plan, or one of another version.
        """
        document = read_json(run.plan)
        if document is None:
            raise UsageError(f"{str(run.root)!r} holds no launch plan")
        return cls.from_json(document)


_PLAN = TypeAdapter(LaunchPlan)
