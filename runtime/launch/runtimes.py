"""The commands of planned workers, by container runtime (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dni_runtime.image.apptainer import run_argv
from dni_runtime.launch.plan import (
    DATA_TARGET,
    RUN_TARGET,
    SOCKETS_TARGET,
    Backend,
    WorkerPlan,
)

# Creates the worker's folders by a shell on its node, which may not be the supervisor's. The socket
# folder must be private to this user; the scratch folder may belong to root.
_MAKE_FOLDERS = (
    "umask 077; sockets=$1; scratch=$2; shift 2; foreign() { "
    'echo "the folder $1 cannot be made, or belongs to another user" >&2; exit 69; }; '
    'mkdir -p -- "$sockets" && [ -O "$sockets" ] && [ ! -L "$sockets" ] && chmod 700 "$sockets" || '
    'foreign "$sockets"; '
    '[ -z "$scratch" ] || { mkdir -p -- "$scratch" && case $(stat -L -c %u -- "$scratch") in '
    '0|$(id -u)) ;; *) false ;; esac; } || foreign "$scratch"; exec "$@"'
)


def worker_argv(worker: WorkerPlan) -> list[str]:
    """Return the command of a worker on its host."""
    return list(RUNTIMES[worker.backend](worker))


def on_node(worker: WorkerPlan) -> list[str]:
    """Return the command that creates a worker's folders on its host and becomes the worker."""
    folders = [worker.sockets, worker.scratch]
    return ["/bin/sh", "-c", _MAKE_FOLDERS, "dni-step", *folders, *worker_argv(worker)]


def process_argv(worker: WorkerPlan) -> list[str]:
    """Return the command of a worker as a plain process."""
    # -P: do not import torch from the current folder.
    return [worker.python, "-P", "-m", "dni_runtime.worker", *worker_arguments(worker)]


def worker_arguments(worker: WorkerPlan) -> list[str]:
    """Return the arguments of a worker as a plain process."""
    return _arguments(worker, worker.run, worker.sockets, worker.data)


def apptainer_argv(worker: WorkerPlan) -> list[str]:
    """Return the command of a worker in a container of Apptainer."""
    assert worker.tool is not None
    assert worker.image is not None
    data = worker.data
    if data is not None:
        (folder,) = (m.source for m in worker.mounts if m.target == str(DATA_TARGET))
        data = str(DATA_TARGET / Path(data).relative_to(folder))
    return run_argv(
        worker.tool,
        worker.image,
        _arguments(worker, RUN_TARGET, SOCKETS_TARGET, data),
        mounts=worker.mounts,
        nv=worker.gpu == "cuda",
        rocm=worker.gpu == "rocm",
        extra=worker.container_args,
    )


RUNTIMES: Mapping[Backend, Callable[[WorkerPlan], Sequence[str]]] = {
    "process": process_argv,
    "apptainer": apptainer_argv,
}


def _arguments(worker: WorkerPlan, run: str, sockets: str, data: str | None) -> list[str]:
    """Return the worker's own arguments; the paths are as the worker sees them."""
    own = ["--module", worker.module, "--ipc", sockets, "--attempt", str(worker.attempt)]
    return [
        *("--run", run),
        *(["--by-rank"] if worker.by_rank else own),
        *(("--first", str(worker.first)) if worker.first is not None else ()),
        *("--resume", worker.resume),
        *(("--replicas", json.dumps(worker.replicas)) if worker.replicas else ()),
        *("--log-level", worker.log_level),
        *(("--transport", worker.transport) if worker.transport else ()),
        *(("--interface", worker.interface) if worker.interface else ()),
        *(("--data", data) if data is not None else ()),
    ]
