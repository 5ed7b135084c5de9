"""What a run is started with, and the plan that follows from it and the chain (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dni_runtime.errors import UsageError
from dni_runtime.files import WORKER_FOLDERS
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.launch.plan import (
    DATA_TARGET,
    RUN_TARGET,
    SOCKETS_TARGET,
    Backend,
    LaunchPlan,
    WorkerPlan,
)
from dni_runtime.launch.restarts import RestartPlan
from dni_runtime.rundir import RunDir
from dni_runtime.spec.data import own_path
from dni_runtime.spec.model import ChainSpec
from dni_runtime.spec.modules import ElasticSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.worker import WorkerSpec
from dni_runtime.worker.version import STARTED_WITH, this_version

# Libraries for matrix products read one of these when they are loaded.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of a plan besides the chain."""

    run: Path  # the directory, as an absolute path
    backend: Backend
    sockets: Path  # folder, for ipc
    data: Path | None = None  # folder or file, of the head
    labels: Path | None = None  # folder or file, if the tail reads them from one of their own
    tool: Apptainer | None = None
    images: Mapping[str, Path] = field(default_factory=dict)  # by module
    # which of ``data`` and ``labels`` are files: containers see the folders they are in
    files: Collection[Path] = ()
    mounts: tuple[Mount, ...] = ()  # further ones of the containers
    attempt: int = 1  # number of this start of the run, from 1
    resume: str = "auto"  # ``auto``, ``none`` or the stream position of a checkpoint
    python: str = "python3"  # for processes
    python_path: str = ""  # the caller's ``PYTHONPATH``, for processes
    log_level: str = "info"
    # transport and interface of upstream links, by module, if not the chain's
    links: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    container_args: tuple[str, ...] = ()  # further ones of the container program
    scratch: str = ""  # folder for temporary files on the worker's node, or empty
    hosts: tuple[str, ...] = ()  # if the user names them
    # A supervisor prepares the run. Otherwise containers see the whole run directory, and the
    # workers create the files that they need.
    supervised: bool = True
    by_rank: bool = False  # one launcher starts all workers, by one command

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
    """Plan the start of all workers, given head first; the plan depends on the arguments alone."""
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
    grouped = [worker for worker in workers if worker.backend is not None]
    for worker in (workers[0], workers[-1], *grouped):
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
            scope="chain" if grouped or any(worker.exact for worker in workers) else "module",
        ),
    )


def _worker_plan(worker: WorkerSpec, settings: LaunchSettings, keys: bool) -> WorkerPlan:
    run, data = RunDir(settings.run), settings.read_by(worker)
    transport, interface = settings.links.get(worker.module, (None, None))
    plan = WorkerPlan(
        module=worker.module,
        attempt=settings.attempt,
        run=str(settings.run),
        ipc=str(settings.sockets),
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
