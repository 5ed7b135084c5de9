"""What follows from a worker's command line: its rank, and the spec of its module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from dni_runtime.errors import DataError, ImageError, UsageError
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir, hash_name, socket_folder
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import module_of, worker_name
from dni_runtime.spec.replicas import with_replicas
from dni_runtime.worker.rank import worker_of_rank
from dni_runtime.worker.start import IMAGE_SPEC, WorkerStart


def by_rank(start: WorkerStart, environ: Mapping[str, str]) -> WorkerStart:
    """Complete the start of a process that ``mpirun`` or ``srun`` has started.

    Each start is another attempt. Sockets of ranks on one host lie in one folder, whose name
    follows from the run: in containers all run directories have the same path.
    """
    run = RunDir(Path(start.run))
    record = RunRecord.load(run.record)
    if record is None:
        raise DataError(
            f"--by-rank: {start.run!r} holds no run: it has no run.json",
            hint="make a run directory with 'dnictl mpi', and mount it there, or name it with "
            "--run; all hosts must see it",
        )
    module = worker_of_rank(environ, record.modules)
    name = hash_name(f"{os.getuid()}:{record.host}:{record.name}:{record.created}")
    return replace(
        start,
        module=module,
        attempt=Report.read(run.worker(module)).attempt + 1,
        ipc=start.ipc or str(socket_folder(run.root, Path("/tmp") / f"dni-{name}")),
    )


def load_spec(start: WorkerStart, image: Path = IMAGE_SPEC) -> WorkerSpec:
    """Read the module's spec: the image's own, checked against the run's if there is one."""
    if start.spec is not None:
        return _at_present(_read_spec(Path(start.spec)), start)
    built = _read_spec(image) if image.is_file() else None
    module = start.module or (built.module if built is not None else None)
    if module is None:
        raise UsageError("no module is named", hint="name one with --module")
    path = RunDir(Path(start.run)).spec(module)
    if not path.is_file():
        if built is None:
            raise UsageError(
                f"there is no spec of module {module!r} in {str(path)!r}",
                hint="start the chain with 'dnictl up', or name the spec with --spec",
            )
        expected = built
    else:
        expected = _read_spec(path)
    if built is not None:
        _check_image(built, expected, start)
    return _at_present(expected, start)


def _at_present(spec: WorkerSpec, start: WorkerStart) -> WorkerSpec:
    """Return the spec with as many replicas of each module as there are in this start."""
    return with_replicas(spec, start.replicas or spec.elastic)


def _check_image(built: WorkerSpec, expected: WorkerSpec, start: WorkerStart) -> None:
    """Refuse an image of another chain; by rank it may be another module's of the same chain.

    All images of a chain have the same packages and sources.
    """
    if start.by_rank and module_of(expected.module) != built.module:
        run = RunDir(Path(start.run))
        of_image = (run.spec(built.module), run.spec(worker_name(built.module, 1, 2)))
        path = next((path for path in of_image if path.is_file()), None)
        if path is None:
            raise ImageError(
                f"the image is of module {built.module!r}, which the run's chain lacks",
                hint="use the images of this chain; 'dnictl mpi' prints the command",
            )
        expected = _read_spec(path)
    of_run = expected.trained or expected.hash
    if built.hash != of_run:
        raise ImageError(
            f"the image is of another spec of module {built.module!r} (image {built.hash[:12]}, "
            f"run {of_run[:12]})",
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
