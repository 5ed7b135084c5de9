"""The launch plan: how workers are started, as data (pure; nothing here touches the machine).

The same plan is printed by ``--dry-run``, kept in the run directory and executed by a starter. Its
commands are rendered last (``launch/runtimes.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from dni_runtime.errors import DataError, UsageError
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.launch.restarts import RestartPlan
from dni_runtime.rundir import WORKER_FOLDERS, RunDir, read_json
from dni_runtime.spec.data import own_path
from dni_runtime.spec.members import Active
from dni_runtime.spec.model import ChainSpec
from dni_runtime.spec.modules import ElasticSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.worker import WorkerSpec
from dni_runtime.worker.version import STARTED_WITH, this_version

Backend = Literal["process", "apptainer"]

# Mount points inside the containers.
RUN_TARGET = "/dni/run"
DATA_TARGET = PurePosixPath("/dni/data")
SOCKETS_TARGET = "/dni/ipc"

AUTO = "auto"
"""``resume`` of a plan whose supervisor chooses the newest complete cut for all workers."""

# Libraries for matrix products read one of these when they are loaded.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
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


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of a plan besides the chain.

    Attributes:
        run: The run directory, as an absolute path.
        backend: Backend of the workers.
        sockets: Folder for the run's ipc sockets.
        data: Folder or file of the head's data, or None.
        labels: Folder or file of the labels, if the tail reads them from one of their own.
        tool: The container program, for containers.
        images: Image of each module, for containers.
        files: Which of ``data`` and ``labels`` are files: containers see the folders they are in.
        mounts: Further mounts of the containers.
        attempt: Number of this start of the run, from 1.
        resume: ``auto``, ``none`` or the stream position of a checkpoint.
        python: The interpreter, for processes.
        python_path: The caller's ``PYTHONPATH``, for processes.
        log_level: Log level of the workers.
        links: Transport and interface of upstream links, by module, if they differ from the chain.
        container_args: Further arguments of the container program.
        scratch: Folder for temporary files on the worker's node, or an empty string.
        hosts: The hosts of the workers, if the user names them.
        supervised: Whether a supervisor prepares the run. Otherwise containers see the whole run
            directory, and the workers create the files that they need.
        by_rank: Whether one launcher starts all workers, by one command.
    """

    run: Path
    backend: Backend
    sockets: Path
    data: Path | None = None
    labels: Path | None = None
    tool: Apptainer | None = None
    images: Mapping[str, Path] = field(default_factory=dict)
    files: Collection[Path] = ()
    mounts: tuple[Mount, ...] = ()
    attempt: int = 1
    resume: str = "auto"
    python: str = "python3"
    python_path: str = ""
    log_level: str = "info"
    links: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    container_args: tuple[str, ...] = ()
    scratch: str = ""
    hosts: tuple[str, ...] = ()
    supervised: bool = True
    by_rank: bool = False

    def read_by(self, worker: WorkerSpec) -> Path | None:
        """Folder or file of the data that a worker reads; None if it reads none, or needs none."""
        if worker.head is not None:
            return None if self.data is None else own_path(self.data, worker.replica)
        if worker.tail is None or worker.tail.labels is None:
            return None
        return self.labels if worker.tail.labels.splits else self.data


def make_plan(
    chain: ChainSpec, workers: Sequence[WorkerSpec], settings: LaunchSettings
) -> LaunchPlan:
    """Plan the start of all workers of a chain.

    Args:
        chain: The chain.
        workers: The workers' specs, head first.
        settings: All other settings.

    Returns:
        The plan; it depends on the arguments alone.

    Raises:
        UsageError: Replicas that come and go, or have to agree, lack a supervisor.
    """
    changing = [
        one.name
        for one in chain.modules
        if isinstance(one.replicas, ElasticSpec) and one.replicas.start < one.most
    ]
    if changing and not settings.supervised:
        raise UsageError(
            f"the number of replicas of {', '.join(changing)} may change, which only "
            "'dnictl up' and 'dnictl submit' can do",
            hint="write a fixed number in the chain file, such as 'replicas: 2'",
        )
    for worker in (workers[0], workers[-1]):
        if worker.replicas > 1 and not (settings.supervised or settings.by_rank):
            raise UsageError(
                f"the replicas of {module_of(worker.module)!r} must be started together",
                hint="use 'dnictl up', 'submit' or 'mpi', or write 'replicas: 1' there",
            )
    transports = {chain.links.transport, *(kind for kind, _ in settings.links.values())}
    keys = chain.links.security != "none" and "tcp" in transports
    return LaunchPlan(
        run=str(settings.run),
        backend=settings.backend,
        sockets=str(settings.sockets),
        stop_grace_s=chain.stop_grace_s,
        workers=tuple(_worker_plan(worker, settings, keys) for worker in workers),
        sources={one.module: tuple(link.source for link in one.links_in) for one in workers},
        keys=keys,
        elastic=workers[0].elastic,
        auto=tuple(
            one.name
            for one in chain.modules
            if isinstance(one.replicas, ElasticSpec) and one.replicas.auto
        ),
        restart=RestartPlan(
            **chain.restart.model_dump(exclude={"snapshot_s"}),
            scope="chain" if any(worker.exact for worker in workers) else "module",
        ),
    )


def _worker_plan(worker: WorkerSpec, settings: LaunchSettings, keys: bool) -> WorkerPlan:
    run, data = RunDir(settings.run), settings.read_by(worker)
    transport, interface = settings.links.get(worker.module, (None, None))
    plan = WorkerPlan(
        module=worker.module,
        attempt=settings.attempt,
        run=str(settings.run),
        sockets=str(settings.sockets),
        log=str(run.log(worker.module, settings.attempt)),
        resume=settings.resume,
        first=settings.attempt if settings.supervised else None,
        log_level=settings.log_level,
        data=None if data is None else str(data),
        transport=transport,
        interface=interface,
        environment=_environment(worker),
        backend=settings.backend,
        python=settings.python,
        scratch=settings.scratch,
    )
    if settings.backend == "apptainer":
        kind = worker.device.partition(":")[0]
        return replace(
            plan,
            tool=settings.tool,
            image=str(settings.images[module_of(worker.module)]),
            mounts=_mounts(worker, settings, keys),
            # Without a GPU Apptainer only warns, which is right for 'auto'; if a GPU is
            # requested, the worker itself refuses to run without it.
            gpu="rocm" if kind == "rocm" else "cuda" if kind in ("cuda", "auto") else None,
            container_args=settings.container_args,
        )
    paths = [str(run.sources), settings.python_path]
    environment = {
        **plan.environment,
        **({"TMPDIR": settings.scratch} if settings.scratch else {}),
        STARTED_WITH: this_version(),  # images keep their version
        "PYTHONPATH": ":".join(path for path in paths if path),
    }
    return replace(plan, environment=environment)


def _run_mounts(worker: WorkerSpec, run: RunDir, keys: bool) -> list[Mount]:
    """Return mounts of what a worker needs: no foreign secret keys, no files that a start reads."""
    read = [run.record, run.spec(worker.module), run.controls]
    if worker.initial:
        read.append(run.initial(module_of(worker.module)))
    if keys:
        read += [run.key(worker.module), run.public_key(worker.module)]
        read += [run.public_key(name) for name in worker.neighbours]

    def target(path: Path) -> str:
        return f"{RUN_TARGET}/{path.relative_to(run.root).as_posix()}"

    written = [run.root / folder for folder in WORKER_FOLDERS]
    return [
        Mount(str(run.container.root), RUN_TARGET),
        *(Mount(str(path), target(path)) for path in read),
        *(Mount(str(path), target(path), read_only=False) for path in written),
    ]


def _mounts(worker: WorkerSpec, settings: LaunchSettings, keys: bool) -> tuple[Mount, ...]:
    if settings.supervised:
        mounts = _run_mounts(worker, RunDir(settings.run), keys)
    else:
        mounts = [Mount(str(settings.run), RUN_TARGET, read_only=False)]
    mounts.append(Mount(str(settings.sockets), SOCKETS_TARGET, read_only=False))
    data = settings.read_by(worker)
    if data is not None:
        folder = data.parent if data in settings.files else data
        mounts.append(Mount(str(folder), str(DATA_TARGET)))
    if settings.scratch:
        mounts.append(Mount(settings.scratch, "/tmp", read_only=False))
    return (*mounts, *settings.mounts)


def _environment(worker: WorkerSpec) -> dict[str, str]:
    threads = str(worker.cpus)
    return {**dict.fromkeys(_THREAD_VARIABLES, threads), "PYTHONFAULTHANDLER": "1"}
