"""Creating run directories."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dni_runtime import __version__
from dni_runtime.errors import UsageError
from dni_runtime.files import is_full, need_room, write_atomic, write_json
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.run.cuts import FORMAT as CHECKPOINT_FORMAT
from dni_runtime.run.documents.records import RunRecord, Versions
from dni_runtime.run.record import user_name
from dni_runtime.run.rundir import RunDir

WORKER_BYTES = 64 << 10
"""Room that a start needs for each worker's small files; checkpoints need more."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def new_run_id(chain: str) -> str:
    """Return a unique run name: chain, local time and a random suffix."""
    return f"{chain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def run_root(chain: str, run_dir: Path | None, runs: Path, name: str | None = None) -> Path:
    """Return the directory of a new run: the given one, or one with a unique name in a folder."""
    return (run_dir or runs / (name or new_run_id(chain))).absolute()


def check_place(run_dir: Path | None, runs: Path, name: str | None = None) -> None:
    """Refuse a directory of a new run that is of no use, before anything takes time."""
    if name is not None and run_dir is not None:
        raise UsageError("--name and --run-dir exclude each other", hint="give one of them")
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a run's name", hint="use at most 100 letters, digits, '.', '_', '-'"
        )
    folder = run_dir or (runs if name is None else runs / name)
    if folder != runs or (folder / "run.json").exists():
        _check_free(folder)
    above = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise UsageError(
            f"the run directory {str(folder)!r} cannot be created: {str(above)!r} is not writable",
            hint="choose another with --run-dir or --runs",
        )


def _check_free(root: Path) -> None:
    """Refuse a directory with files, which those of a run could replace."""
    if (root / "run.json").exists():
        raise UsageError(
            f"{str(root)!r} already holds a run",
            hint=f"resume it with 'dnictl resume {root}', or use another --name or --run-dir",
        )
    if root.is_dir() and any(root.iterdir()):
        raise UsageError(
            f"{str(root)!r} is not empty: a run has a directory of its own",
            hint="use another --name or --run-dir",
        )


def create_run(
    root: Path,  # must not hold anything yet
    prepared: CheckedChain,
    *,
    backend: str,
    images: Mapping[str, Path] | None = None,  # by module, for containers
    scheduler: str = "local",
    hosts: Sequence[str] = (),  # of the workers, if the user names them
) -> RunDir:
    """Write all that workers, supervisor and later commands need into a new run directory."""
    run = RunDir(root.absolute())
    try:
        _check_free(root)
        run.root.parent.mkdir(parents=True, exist_ok=True)
        need_room(run.root.parent, WORKER_BYTES * len(prepared.replicas))
        run.create()
    except OSError as error:
        if is_full(error):
            raise  # said as what it is
        raise UsageError(
            f"the run directory {str(root)!r} cannot be created: {error.strerror}",
            hint="choose another with --run-dir or --runs",
        ) from None
    for name, source in prepared.sources.items():
        target = run.sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    for worker in prepared.replicas:
        write_atomic(run.spec(worker.module), worker.to_json())
    if prepared.initial:
        from dni_runtime.plan.initial import write_initial  # imports torch

        write_initial(run, prepared.initial)
    if prepared.carried is not None:
        from dni_runtime.plan.carrying import write_carried  # imports torch

        write_carried(run, prepared)
    write_atomic(run.chain_file, prepared.path.read_bytes())
    write_json(run.chain, prepared.chain.model_dump(mode="json"))
    from dni_runtime.wire import PROTOCOL_VERSION  # numpy: only to create a run

    RunRecord(
        run=run.root.name,
        chain=prepared.chain.name,
        modules=tuple(worker.module for worker in prepared.replicas),
        backend=backend,
        scheduler=scheduler,
        hosts=tuple(hosts),
        created=time.time(),
        chain_file=prepared.path.absolute(),
        data=prepared.data,
        carried=None if prepared.carried is None else prepared.carried.record.run.root,
        serves=None if prepared.trained is None else prepared.trained.record.run.root,
        images=dict(images or {}),
        preprocessing=None if prepared.looked is None else prepared.looked.preprocessing,
        epochs=prepared.chain.epochs,
        batches_per_epoch=prepared.batches_per_epoch,
        total_steps=prepared.total_steps,
        user=user_name(os.geteuid()),
        host=socket.gethostname(),
        versions=Versions(
            dni_runtime=__version__,
            python=platform.python_version(),
            protocol=PROTOCOL_VERSION,
            checkpoint=CHECKPOINT_FORMAT,
        ),
    ).write(run.record)
    return run
