"""The commands of planned workers, by container runtime (pure)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dni_runtime.image.apptainer import run_argv
from dni_runtime.plan.plan import DATA_TARGET, RUN_TARGET, SOCKETS_TARGET, WorkerPlan

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
    return process_argv(worker) if worker.image is None else apptainer_argv(worker)


def on_node(worker: WorkerPlan) -> list[str]:
    """Return the command that creates a worker's folders on its host and becomes the worker."""
    folders = [worker.ipc, worker.scratch]
    return ["/bin/sh", "-c", _MAKE_FOLDERS, "dni-step", *folders, *worker_argv(worker)]


def process_argv(worker: WorkerPlan) -> list[str]:
    """Return the command of a worker as a plain process."""
    # -P: do not import torch from the current folder.
    return [worker.python, "-P", "-m", "dni_runtime.worker", *worker.argv()]


def apptainer_argv(worker: WorkerPlan) -> list[str]:
    """Return the command of a worker in a container of Apptainer."""
    assert worker.tool is not None
    assert worker.image is not None
    inside = replace(worker, run=RUN_TARGET, ipc=SOCKETS_TARGET if worker.ipc else "")
    if worker.data is not None:
        (folder,) = (m.source for m in worker.mounts if m.target == str(DATA_TARGET))
        inside = replace(inside, data=str(DATA_TARGET / Path(worker.data).relative_to(folder)))
    return run_argv(
        worker.tool,
        worker.image,
        inside.argv(),
        mounts=worker.mounts,
        nv=worker.gpu == "cuda",
        rocm=worker.gpu == "rocm",
        extra=worker.container_args,
    )
