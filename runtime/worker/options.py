"""What follows from a worker's command line: its rank, and the spec of its module.

``mpirun``, ``srun`` and an Indexed Job of Kubernetes give all processes the same command. The
launcher's variables give each a rank, which is its place in the run's list of workers, replicas
included; if the command names a module, in that of the module's replicas.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from dni_runtime.errors import DataError, ImageError, UnavailableError, UsageError
from dni_runtime.files import write_atomic
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.documents.reports import ENDED, ChainStart, Report
from dni_runtime.run.documents.requests import Stop
from dni_runtime.run.keys import Keyring, KnownKeys, RunKeys
from dni_runtime.run.rundir import RunDir, hash_name, socket_folder
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import module_of, worker_name
from dni_runtime.spec.replicas import with_replicas
from dni_runtime.worker.background import repeating
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import IMAGE_SERVING, IMAGE_SPEC, OWN, WorkerStart


def by_rank(start: WorkerStart, environ: Mapping[str, str]) -> WorkerStart:
    """Complete the start of a process that ``mpirun``, ``srun`` or an Indexed Job has started.

    Each start is another attempt. Sockets of ranks on one host lie in one folder, whose name
    follows from the run: in containers all run directories have the same path.

    A pod of a Job that is replaced alone goes on from its own newest state, as one that a
    supervisor restarts. That it is not a start of the whole chain follows from its last report: the
    Job is the same, and the chain did not stop as a whole.
    """
    run = given_run(start)
    record = RunRecord.load(run.record)
    if record is None:
        raise DataError(
            f"--by-rank: {start.run!r} holds no run: it has no run.json",
            hint="make a run directory with 'dnictl mpi', and mount it there, or name it with "
            "--run; all hosts must see it",
        )
    ranks = [name for name in record.modules if start.module in ("", module_of(name))]
    if not ranks:
        raise UsageError(
            f"--by-rank: the run has no module {start.module!r}",
            hint=f"its workers: {', '.join(record.modules)}",
        )
    module = worker_of_rank(environ, ranks)
    report = Report.read(run.worker(module))
    attempt, first, resume = next_attempt(report, start.resume), None, start.resume
    if start.start is not None and JOB_INDEX in environ:
        first, before = attempt, report.chain_start
        stopped = report.state == "stopped" and report.error is None  # with all others
        began = before is not None and before.number == start.start and not stopped
        if before is not None and began and before.cut is not None:
            first, resume = before.first, str(before.cut)
    name = hash_name(f"{os.getuid()}:{record.host}:{record.name}:{record.created}")
    return replace(
        start,
        module=module,
        attempt=attempt,
        first=first,
        resume=resume,
        ipc=start.ipc or str(socket_folder(run.root, Path("/tmp") / f"dni-{name}")),
    )


def next_attempt(report: Report, resume: str) -> int:
    """Return the number of a worker's next start, by its last report.

    One that always starts alone may have lost that with its pod: the clock counts.
    """
    return max(report.attempt + 1, int(time.time()) if resume == OWN else 0)


def chain_start(start: WorkerStart) -> ChainStart | None:
    """Return what the report of a worker says that may be replaced alone; see :func:`by_rank`."""
    if not start.by_rank or start.first is None:
        return None
    cut = int(start.resume) if start.resume.isdecimal() else None
    return ChainStart(number=start.start or 0, first=start.first, cut=cut)


def given_run(start: WorkerStart) -> RunDir:
    """Return a start's run directory, with the first files of a new run, if it was given some.

    Several workers may write them at once. The record is last: with it, the run is complete.
    """
    run = RunDir(Path(start.run))
    if start.given is None:
        return run
    given = Path(start.given)
    try:
        run.create()
        files = {path.relative_to(given): path.read_bytes() for path in _files(given)}
        there = run.record.exists()
        for name in sorted(files, key=Path(run.record.name).__eq__):
            path = run.root / name
            if not there:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomic(path, files[name])
            elif name.parent.name == "specs" and path.read_bytes() != files[name]:
                raise UsageError(
                    f"{str(run.root)!r} holds a run of another chain file, or an older one",
                    hint="give the new run another name, or remove that folder",
                )
        importlib.invalidate_caches()  # the folder of sources was not there
    except OSError as error:
        raise UnavailableError(
            f"--given: the run directory {str(run.root)!r} cannot be made: {error.strerror} "
            f"({error.filename})",
            hint=f"the volume must be there, and writable for user {os.getuid()}",
        ) from None
    return run


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that Kubernetes mounts, without its own (``..data``)."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith(".."):
            yield from _files(path)
        elif path.is_file():
            yield path


def keyring(start: WorkerStart, run: RunDir, module: str) -> Keyring:
    """Return a worker's keys: those that its launcher keeps, else the run's."""
    return RunKeys(run, module) if start.keys is None else KnownKeys.read(Path(start.keys), module)


def released_weights(spec: WorkerSpec, image: Path = IMAGE_SERVING) -> Path | None:
    """Return the weights of a release in the module's image; None if it has none."""
    if not image.is_dir():
        return None
    built, module = _read_spec(image / "module.json"), module_of(spec.module)
    if (built.module, built.trained) != (module, spec.trained):
        raise ImageError(
            f"the image has the weights of module {built.module!r}, not of this {module!r}",
            hint="each module of a release is served by its own image",
        )
    return image / "weights.safetensors"


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


JOB_INDEX = "JOB_COMPLETION_INDEX"
"""Set by an Indexed Job of Kubernetes, with a pod for each rank: a dead one is replaced alone."""

LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and Intel MPI (Hydra); srun --mpi=pmi2
    (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
    ),  # srun with any --mpi; a batch script lacks the second
    ("PMIX_RANK", None),  # other launchers with PMIx, which has no variable for the size
    (JOB_INDEX, None),
)
"""Variables of rank and size. The first pair that is set counts: the innermost launcher's, because
a batch script's ``mpirun`` inherits Slurm's variables."""

_LOOK_S = 1.0
_END_LOOK_S = 0.1
_SAVES = 10  # times the limit, without progress


def worker_of_rank(environ: Mapping[str, str], workers: Sequence[str]) -> str:
    """Return the worker that this process is: its rank is a place in ``workers``, head first."""
    for rank_name, size_name in LAUNCHERS:
        if rank_name in environ and (size_name is None or size_name in environ):
            break
    else:
        names = ", ".join(name for name, _ in LAUNCHERS)
        raise UsageError(
            f"--by-rank: this process has no rank: no launcher has set any of {names}",
            hint="start it with mpirun, mpiexec or srun (--cleanenv hides what they set), or name "
            "the module with --module",
        )
    rank, size = _number(environ, rank_name), len(workers)
    if size_name is not None:
        size = _number(environ, size_name)
    if size != len(workers) or rank >= size:
        started = f" of {size} ({size_name})" if size_name is not None else ""
        raise UsageError(
            f"--by-rank: this is process {rank} ({rank_name}){started}, but the run has "
            f"{len(workers)} workers: {', '.join(workers)}",
            hint=f"start one process for each: mpirun -n {len(workers)}",
        )
    return workers[rank]


def start_of(spec: WorkerSpec, number: int | None) -> int:
    """Return which start of the whole chain this is: what ``--start`` says.

    Replicas of the head and of the tail agree by files, in which lines of earlier starts are left,
    and so do those that form a process group: they need it.
    """
    agrees = spec.head is not None or spec.tail is not None or spec.backend is not None
    if number is None and spec.replicas > 1 and agrees:
        raise UsageError(
            f"--by-rank: {spec.module!r} must know which start of the chain this is",
            hint="add --start $(date +%s) to the command of all ranks",
        )
    return number or 0


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise UsageError(f"--by-rank: {name}={environ[name]!r} is not a number")
    return int(environ[name])


def heeding_stop(run: RunDir, stop: StopRequest) -> contextlib.AbstractContextManager[None]:
    """Stop, in a thread, when ``dnictl stop`` is called: no supervisor passes it on."""
    former = Stop.peek(run.stop_request)  # what stopped an earlier start

    def look() -> None:
        if Stop.peek(run.stop_request) not in (None, former):
            stop.stop()

    return repeating("stop", _LOOK_S, look)


def wait_for_others(run: RunDir, workers: Sequence[str], within_s: float) -> None:
    """Wait until all workers have saved their state and ended.

    ``mpirun`` kills all processes when one exits with another status than 0, and that is how a
    stopped worker exits. ``within_s`` is extended while one makes progress with its checkpoint.
    """
    until_s, saved = time.monotonic() + within_s, None
    while active := [
        report for report in map(Report.read, map(run.worker, workers)) if report.state not in ENDED
    ]:
        saving = [report.saving for report in active if report.saving is not None]
        if saving and saving != saved:
            saved, until_s = saving, time.monotonic() + _SAVES * within_s
        if time.monotonic() >= until_s:
            return
        time.sleep(_END_LOOK_S)
