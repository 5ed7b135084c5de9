"""The launch plan: the commands to start, as data (pure; nothing here touches the machine).

The same plan is printed by ``--dry-run``, kept in the run directory and executed by a starter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from dni_runtime.errors import DataError
from dni_runtime.image.apptainer import Apptainer, Mount, run_argv
from dni_runtime.launch.restarts import RestartPlan
from dni_runtime.launch.slurm.placement import Need
from dni_runtime.rundir import WORKER_FOLDERS, RunDir
from dni_runtime.spec.model import ChainSpec
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


@dataclass(frozen=True)
class WorkerPlan:
    """How one worker is started.

    Attributes:
        module: The module that it serves.
        attempt: Number of this start of the module, from 1.
        argv: The command.
        environment: Variables that extend the starting process's environment.
        mounts: Folders of the host inside its container.
        image: Path of its image, or None without a container.
        log: File for its output.
        node: Its cluster node, or None for this host.
        need: Its resources there.
    """

    module: str
    attempt: int
    argv: tuple[str, ...]
    environment: dict[str, str]
    log: str
    mounts: tuple[Mount, ...] = ()
    image: str | None = None
    node: str | None = None
    need: Need | None = None

    def again(self, attempt: int, *, resume: str | None = None) -> WorkerPlan:
        """Return the plan of the worker's next start.

        Args:
            attempt: Number of that start of the module.
            resume: Where the whole chain starts (``worker/resume.py``); None: only this worker
                restarts, at its own newest state if it has joined the stream.
        """
        argv = list(self.argv)
        changed = {"--attempt": str(attempt)}
        if resume is not None:
            changed |= {"--resume": resume, "--first": str(attempt)}
        for name, value in changed.items():
            argv[argv.index(name) + 1] = value
        log = RunDir(Path(self.log).parent.parent).log(self.module, attempt)
        return replace(self, attempt=attempt, argv=tuple(argv), log=str(log))

    @property
    def resume(self) -> str:
        """Where it starts: ``auto``, ``none`` or the stream position of a checkpoint."""
        return self.argv[self.argv.index("--resume") + 1]


@dataclass(frozen=True)
class LaunchPlan:
    """How a run's workers are started.

    Attributes:
        run: The run directory.
        backend: Backend of the workers.
        sockets: Folder of the run's ipc sockets.
        stop_grace_s: Seconds that workers have to stop.
        workers: One per module, head first.
        sources: Names of the modules that each one takes its inputs from.
        keys: Whether the workers need keys, for links that may be encrypted.
        restart: Rules for restarts of dead workers.
    """

    run: str
    backend: Backend
    sockets: str
    stop_grace_s: float
    workers: tuple[WorkerPlan, ...]
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: bool = False
    restart: RestartPlan = field(default_factory=RestartPlan)

    @property
    def resume(self) -> str:
        """Where the workers start, all at the same cut."""
        return self.workers[0].resume

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Return the plan in a document of :meth:`to_json`.

        Raises:
            DataError: The document is not a plan.
        """
        try:
            workers = tuple(
                WorkerPlan(
                    **{
                        **worker,
                        "argv": tuple(worker["argv"]),
                        "mounts": tuple(Mount(**mount) for mount in worker["mounts"]),
                        "need": Need(**worker["need"]) if worker.get("need") else None,
                    }
                )
                for worker in document["workers"]
            )
            restart = RestartPlan(**document.get("restart", {}))
            sources = {name: tuple(own) for name, own in document.get("sources", {}).items()}
            made = {"workers": workers, "sources": sources, "restart": restart}
            return cls(**{**document, **made})
        except (KeyError, TypeError) as error:
            raise DataError(f"not a launch plan: {error!r}") from None


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of a plan besides the chain.

    Attributes:
        run: The run directory, as an absolute path.
        backend: Backend of the workers.
        sockets: Folder for the run's ipc sockets.
        data: Folder or file of the head's data, or None.
        tool: The container program, for containers.
        images: Image of each module, for containers.
        data_folder: The folder of ``data`` to mount into containers, when ``data`` is a file.
        mounts: Further mounts of the containers.
        attempt: Number of this start of the run, from 1.
        resume: ``auto``, ``none`` or the stream position of a checkpoint.
        python: The interpreter, for processes.
        python_path: The caller's ``PYTHONPATH``, for processes.
        log_level: Log level of the workers.
        links: Transport and interface of upstream links, by module, if they differ from the chain.
        container_args: Further arguments of the container program.
        scratch: Folder for temporary files on the worker's node, or an empty string.
        supervised: Whether a supervisor prepares the run. Otherwise containers see the whole run
            directory, and the workers create the files that they need.
    """

    run: Path
    backend: Backend
    sockets: Path
    data: Path | None = None
    tool: Apptainer | None = None
    images: Mapping[str, Path] = field(default_factory=dict)
    data_folder: Path | None = None
    mounts: tuple[Mount, ...] = ()
    attempt: int = 1
    resume: str = "auto"
    python: str = "python3"
    python_path: str = ""
    log_level: str = "info"
    links: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    container_args: tuple[str, ...] = ()
    scratch: str = ""
    supervised: bool = True


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
    """
    transports = {chain.links.transport, *(kind for kind, _ in settings.links.values())}
    keys = chain.links.security != "none" and "tcp" in transports

    def make(worker: WorkerSpec) -> WorkerPlan:
        if settings.backend == "apptainer":
            return _in_container(worker, settings, keys)
        return _as_process(worker, settings)

    return LaunchPlan(
        run=str(settings.run),
        backend=settings.backend,
        sockets=str(settings.sockets),
        stop_grace_s=chain.stop_grace_s,
        workers=tuple(make(worker) for worker in workers),
        sources={one.module: tuple(edge.source for edge in one.sources) for one in workers},
        keys=keys,
        restart=RestartPlan(
            **chain.restart.model_dump(exclude={"snapshot_s"}),
            scope="chain" if any(worker.exact for worker in workers) else "module",
        ),
    )


def _as_process(worker: WorkerSpec, settings: LaunchSettings) -> WorkerPlan:
    run = RunDir(settings.run)
    paths = [str(run.sources), settings.python_path]
    return WorkerPlan(
        module=worker.module,
        attempt=settings.attempt,
        # -P: do not import torch from the current folder.
        argv=(
            *(settings.python, "-P", "-m", "dni_runtime.worker"),
            *_arguments(worker, settings, str(settings.run), str(settings.sockets)),
            *(("--data", str(settings.data)) if worker.head and settings.data else ()),
        ),
        environment={
            **_environment(worker),
            **({"TMPDIR": settings.scratch} if settings.scratch else {}),
            STARTED_WITH: this_version(),  # images keep their version
            "PYTHONPATH": ":".join(path for path in paths if path),
        },
        log=str(run.log(worker.module, settings.attempt)),
    )


def _run_mounts(worker: WorkerSpec, run: RunDir, keys: bool) -> list[Mount]:
    """Return mounts of what a worker needs: no foreign secret keys, no files that a start reads."""
    read = [run.record, run.spec(worker.module)]
    if worker.initial:
        read.append(run.initial(worker.module))
    if keys:
        neighbours = [edge.source for edge in worker.sources]
        neighbours += [edge.target for edge in worker.targets]
        read += [run.key(worker.module), run.public_key(worker.module)]
        read += [run.public_key(name) for name in neighbours]

    def target(path: Path) -> str:
        return f"{RUN_TARGET}/{path.relative_to(run.root).as_posix()}"

    written = [run.root / folder for folder in WORKER_FOLDERS]
    return [
        Mount(str(run.container.root), RUN_TARGET),
        *(Mount(str(path), target(path)) for path in read),
        *(Mount(str(path), target(path), read_only=False) for path in written),
    ]


def _in_container(worker: WorkerSpec, settings: LaunchSettings, keys: bool) -> WorkerPlan:
    assert settings.tool is not None
    run = RunDir(settings.run)
    if settings.supervised:
        mounts = _run_mounts(worker, run, keys)
    else:
        mounts = [Mount(str(settings.run), RUN_TARGET, read_only=False)]
    mounts.append(Mount(str(settings.sockets), SOCKETS_TARGET, read_only=False))
    arguments = _arguments(worker, settings, RUN_TARGET, SOCKETS_TARGET)
    if worker.head is not None and settings.data is not None:
        folder = settings.data_folder or settings.data
        mounts.append(Mount(str(folder), str(DATA_TARGET)))
        arguments += ["--data", str(DATA_TARGET / settings.data.relative_to(folder))]
    if settings.scratch:
        mounts.append(Mount(settings.scratch, "/tmp", read_only=False))
    mounts += settings.mounts
    image = settings.images[worker.module]
    kind = worker.device.partition(":")[0]
    return WorkerPlan(
        module=worker.module,
        attempt=settings.attempt,
        argv=tuple(
            run_argv(
                settings.tool,
                image,
                arguments,
                mounts=mounts,
                # Without a GPU these only warn, which is right for 'auto'; if a GPU is
                # requested, the worker itself refuses to run without it.
                nv=kind in ("cuda", "auto"),
                rocm=kind == "rocm",
                extra=settings.container_args,
            )
        ),
        environment=_environment(worker),
        log=str(run.log(worker.module, settings.attempt)),
        mounts=tuple(mounts),
        image=str(image),
    )


def _arguments(worker: WorkerSpec, settings: LaunchSettings, run: str, sockets: str) -> list[str]:
    transport, interface = settings.links.get(worker.module, (None, None))
    return [
        *("--run", run),
        *("--module", worker.module),
        *("--ipc", sockets),
        *("--attempt", str(settings.attempt)),
        *(("--first", str(settings.attempt)) if settings.supervised else ()),
        *("--resume", settings.resume),
        *("--log-level", settings.log_level),
        *(("--transport", transport) if transport else ()),
        *(("--interface", interface) if interface else ()),
    ]


def _environment(worker: WorkerSpec) -> dict[str, str]:
    threads = str(worker.cpus)
    return {**dict.fromkeys(_THREAD_VARIABLES, threads), "PYTHONFAULTHANDLER": "1"}
