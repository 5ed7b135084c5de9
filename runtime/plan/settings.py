"""Settings of a start, and the plan that follows from them and the chain (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from dni_runtime.errors import UsageError
from dni_runtime.files import WORKER_FOLDERS
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.plan.plan import (
    DATA_TARGET,
    RUN_TARGET,
    SOCKETS_TARGET,
    Backend,
    LaunchPlan,
    RestartPlan,
    WorkerPlan,
)
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.data import own_path
from dni_runtime.spec.load import suggestion
from dni_runtime.spec.model import ChainSpec
from dni_runtime.spec.modules import ElasticSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.predicting import exit_name
from dni_runtime.spec.worker import WorkerSpec
from dni_runtime.worker.start import STARTED_WITH, this_version

# Libraries for matrix products read one of these when they are loaded.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


BackendChoice = Literal["auto", "process", "apptainer"]
"""Backends that a user can name; ``auto``: Apptainer, if it and the images are there."""

LOG_LEVELS = ("debug", "info", "warning", "error")

UNSUPERVISED = ("mpi", "kubernetes")
"""Schedulers whose launcher starts workers that find their modules by rank."""


@dataclass(frozen=True)
class StartSettings:
    """What a user chooses for a start of a run, besides the chain."""

    run: Path  # the directory, as an absolute path
    backend: BackendChoice = "auto"
    images: Path = Path("images")  # their folder
    scheduler: str = "local"  # what starts the workers (``schedulers/schedulers.py``)
    hosts: tuple[str, ...] = ()  # for ``ssh``
    job: JobRecord | None = None  # for ``slurm``; None: the run has the record of its job
    by_hand: bool = False  # the user starts the workers one by one
    attempt: int = 1  # number of this start of the run, from 1
    resume: str = "auto"  # ``auto``, ``none`` or the stream position of a checkpoint
    log_level: str = "info"  # of the workers

    def __post_init__(self) -> None:
        for name, allowed in (("backend", get_args(BackendChoice)), ("log_level", LOG_LEVELS)):
            if (value := getattr(self, name)) not in allowed:
                raise UsageError(f"{name!r} is {value!r}", hint=suggestion(str(value), [*allowed]))

    @property
    def elsewhere(self) -> bool:
        """Whether the workers run on other hosts, which share the files of this one."""
        return self.scheduler != "local"

    @property
    def supervised(self) -> bool:
        """Whether a supervisor prepares the run and starts the workers.

        Otherwise containers see the whole run directory, and the workers create the files that they
        need.
        """
        return not (self.by_hand or self.scheduler in UNSUPERVISED)


@dataclass(frozen=True)
class Site:
    """What the hosts offer a run: checked on this one, completed by the scheduler."""

    backend: Backend
    tool: Apptainer | None = None
    images: Mapping[str, Path] = field(default_factory=dict)  # by module
    mounts: tuple[Mount, ...] = ()  # further ones of the containers
    notices: tuple[str, ...] = ()  # for the user
    data: Path | None = None  # folder or file, of the head
    # which of the data and the labels are files: containers see the folders they are in
    files: Collection[Path] = ()
    sockets: Path = Path("/tmp")  # folder, for ipc
    python: str = "python3"  # for processes
    python_path: str = ""  # the caller's ``PYTHONPATH``, for processes
    # transport and interface of upstream links, by module, if not the chain's
    links: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    container_args: tuple[str, ...] = ()  # further ones of the container program
    scratch: str = ""  # folder for temporary files on the worker's node, or empty


@dataclass(frozen=True)
class StartRequest:
    """What a start is planned from; the plan depends on it alone."""

    chain: ChainSpec  # with all defaults filled in
    workers: Sequence[WorkerSpec]  # of all replicas, head first
    settings: StartSettings
    site: Site
    front: WorkerSpec | None = None  # of a chain that only predicts: of the process that serves it


def make_plan(request: StartRequest) -> LaunchPlan:
    chain, workers = request.chain, request.workers
    settings, site = request.settings, request.site
    changing = [
        module.name
        for module in chain.modules
        if isinstance(module.replicas, ElasticSpec) and module.replicas.start < module.most
    ]
    if changing and not settings.supervised:
        raise UsageError(
            f"the number of replicas of {', '.join(changing)} may change, which only "
            "'dnictl up' and 'dnictl submit' can do",
            hint="write a fixed number in the chain file, such as 'replicas: 2'",
        )
    grouped = [worker for worker in workers if worker.backend is not None]
    for worker in (workers[0], workers[-1], *grouped):
        if worker.replicas > 1 and settings.by_hand:
            raise UsageError(
                f"the replicas of {module_of(worker.module)!r} must be started together",
                hint="use 'dnictl up', 'submit' or 'mpi', or write 'replicas: 1' there",
            )
    transports = {chain.links.transport, *(kind for kind, _ in site.links.values())}
    keys = chain.links.security != "none" and "tcp" in transports
    here = replace(request, site=replace(site, backend="process"))
    return LaunchPlan(
        run=str(settings.run),
        backend=site.backend,
        sockets=str(site.sockets),
        stop_grace_s=chain.stop_grace_s,
        workers=tuple(_worker_plan(worker, request, keys) for worker in workers),
        sources={
            worker.module: tuple(link.source for link in worker.links_in) for worker in workers
        },
        keys=keys,
        scheduler=settings.scheduler,
        elastic=workers[0].elastic,
        auto=tuple(
            module.name
            for module in chain.modules
            if isinstance(module.replicas, ElasticSpec) and module.replicas.auto
        ),
        front=None if request.front is None else _worker_plan(request.front, here, keys),
        restart=RestartPlan(
            **chain.restart.model_dump(exclude={"snapshot_s"}),
            scope="chain" if grouped or any(worker.exact for worker in workers) else "module",
        ),
    )


def _worker_plan(worker: WorkerSpec, request: StartRequest, keys: bool) -> WorkerPlan:
    settings, site = request.settings, request.site
    run, data = RunDir(settings.run), _read_by(worker, request)
    transport, interface = site.links.get(worker.module, (None, None))
    plan = WorkerPlan(
        run=str(settings.run),
        module=worker.module,
        ipc=str(site.sockets),
        attempt=settings.attempt,
        first=settings.attempt if settings.supervised else None,
        resume=settings.resume,
        log_level=settings.log_level,
        transport=transport,
        interface=interface,
        data=None if data is None else str(data),
        log=str(run.log(worker.module, settings.attempt)),
        environment=dict.fromkeys(_THREADS, str(worker.cpus)) | {"PYTHONFAULTHANDLER": "1"},
        python=site.python,
        scratch=site.scratch,
    )
    if site.backend == "apptainer":
        kind = worker.device.partition(":")[0]
        return replace(
            plan,
            tool=site.tool,
            image=str(site.images[module_of(worker.module)]),
            mounts=_mounts(worker, request, data, keys),
            # Without a GPU Apptainer only warns, which is right for 'auto'; if a GPU is
            # requested, the worker itself refuses to run without it.
            gpu="rocm" if kind == "rocm" else "cuda" if kind in ("cuda", "auto") else None,
            container_args=site.container_args,
        )
    environment = {
        **plan.environment,
        **({"TMPDIR": site.scratch} if site.scratch else {}),
        STARTED_WITH: this_version(),  # images keep their version
        "PYTHONPATH": ":".join(filter(None, [str(run.sources), site.python_path])),
    }
    return replace(plan, environment=environment)


def _read_by(worker: WorkerSpec, request: StartRequest) -> Path | None:
    """Return folder or file of the data that a worker reads; None if it reads or needs none."""
    data = request.site.data
    if worker.head is not None:
        return None if data is None else own_path(data, worker.replica)
    if worker.tail is None or worker.tail.labels is None:
        return None
    return request.chain.data.labels_path if worker.tail.labels.splits else data


def _run_mounts(worker: WorkerSpec, run: RunDir, keys: bool) -> list[Mount]:
    """Return mounts of what a worker needs: no foreign secret keys, no files that a start reads."""
    read = [run.record, run.spec(worker.module), run.controls]
    if worker.initial:
        read.append(run.initial(module_of(worker.module)))
    if worker.exit is not None:
        read.append(run.initial(exit_name(worker.module)))
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


def _mounts(
    worker: WorkerSpec, request: StartRequest, data: Path | None, keys: bool
) -> tuple[Mount, ...]:
    settings, site = request.settings, request.site
    if settings.supervised:
        mounts = _run_mounts(worker, RunDir(settings.run), keys)
    else:
        mounts = [Mount(str(settings.run), RUN_TARGET, read_only=False)]
    mounts.append(Mount(str(site.sockets), SOCKETS_TARGET, read_only=False))
    if data is not None:
        mounts.append(Mount(str(data.parent if data in site.files else data), str(DATA_TARGET)))
    if site.scratch:
        mounts.append(Mount(site.scratch, "/tmp", read_only=False))
    return (*mounts, *site.mounts)
