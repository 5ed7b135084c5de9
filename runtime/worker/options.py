"""What a worker is told: its command line, its rank, and the spec of its module."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dni_runtime.documents.records import RunRecord
from dni_runtime.documents.reports import Report
from dni_runtime.errors import DataError, ImageError, UsageError
from dni_runtime.rundir import RunDir, hash_name, socket_folder
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import module_of, worker_name
from dni_runtime.spec.replicas import with_replicas
from dni_runtime.worker.rank import worker_of_rank


@dataclass(frozen=True)
class Options:
    """The worker's command line; see ``python -m dni_runtime.worker --help``."""

    run: Path
    module: str | None = None
    by_rank: bool = False
    spec: Path | None = None
    image_spec: Path | None = None
    ipc: Path | None = None
    data: str | None = None
    listen: str | None = None
    connect: str | None = None
    transport: Literal["ipc", "tcp"] | None = None
    interface: str | None = None
    attempt: int = 1
    first: int | None = None
    start: int | None = None
    resume: str = "auto"
    replicas: str | None = None


def by_rank(options: Options, environ: Mapping[str, str]) -> Options:
    """Complete the options of a process that ``mpirun`` or ``srun`` has started.

    Each start is another attempt. Sockets of ranks on one host lie in one folder, whose name
    follows from the run: in containers all run directories have the same path.
    """
    run = RunDir(options.run)
    record = RunRecord.load(run.record)
    if record is None:
        raise DataError(
            f"--by-rank: {str(options.run)!r} holds no run: it has no run.json",
            hint="make a run directory with 'dnictl mpi', and mount it there, or name it with "
            "--run; all hosts must see it",
        )
    module = worker_of_rank(environ, record.modules)
    name = hash_name(f"{os.getuid()}:{record.host}:{record.name}:{record.created}")
    return replace(
        options,
        module=module,
        attempt=Report.read(run.worker(module)).attempt + 1,
        ipc=options.ipc or socket_folder(run.root, Path("/tmp") / f"dni-{name}"),
    )


def load_spec(options: Options) -> WorkerSpec:
    """Read the module's spec: the image's own, checked against the run's if there is one."""
    image = options.image_spec
    if options.spec is not None:
        return _at_present(_read_spec(options.spec), options)
    own = _read_spec(image) if image is not None and image.is_file() else None
    module = options.module or (own.module if own is not None else None)
    if module is None:
        raise UsageError("no module is named", hint="name one with --module")
    path = RunDir(options.run).spec(module)
    if not path.is_file():
        if own is None:
            raise UsageError(
                f"there is no spec of module {module!r} in {str(path)!r}",
                hint="start the chain with 'dnictl up', or name the spec with --spec",
            )
        wanted = own
    else:
        wanted = _read_spec(path)
    if own is not None:
        _check_image(own, wanted, options)
    return _at_present(wanted, options)


def _at_present(spec: WorkerSpec, options: Options) -> WorkerSpec:
    """Return the spec with as many replicas of each module as there are in this start."""
    return with_replicas(
        spec, spec.elastic if options.replicas is None else json.loads(options.replicas)
    )


def _check_image(own: WorkerSpec, wanted: WorkerSpec, options: Options) -> None:
    """Refuse an image of another chain; by rank it may be another module's of the same chain.

    All images of a chain have the same packages and sources.
    """
    if options.by_rank and module_of(wanted.module) != own.module:
        run = RunDir(options.run)
        of_image = (run.spec(own.module), run.spec(worker_name(own.module, 1, 2)))
        path = next((path for path in of_image if path.is_file()), None)
        if path is None:
            raise ImageError(
                f"the image is of module {own.module!r}, which the run's chain lacks",
                hint="use the images of this chain; 'dnictl mpi' prints the command",
            )
        wanted = _read_spec(path)
    if own.hash != wanted.hash:
        raise ImageError(
            f"the image is of another spec of module {own.module!r} (image {own.hash[:12]}, "
            f"run {wanted.hash[:12]})",
            hint="rebuild the images with 'dnictl build'",
        )


def _read_spec(path: Path) -> WorkerSpec:
    try:
        return WorkerSpec.from_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"the module's spec cannot be read: {error}") from None
    except ValidationError as error:
        raise DataError(
            f"{str(path)!r} is not a module's spec: {error.errors()[0]['msg']}",
            hint="it was written by another version; rebuild the images",
        ) from None
