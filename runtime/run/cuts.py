"""The checkpoints of a run on disk: listing, checking and removing them.

Only this module lists ``checkpoints/``. A cut is a folder named after a position in the stream,
in twelve digits; everything else there is ignored. A module's *part* of a cut is
``MODULE.safetensors`` and ``MODULE.json``. The JSON is written last; it holds the size of the other
file (``bytes``) and a checksum over both (``sha256``). Of a module with replicas there is a part
for each one that took part; their number is in the first one's document (``replicas``), because
a later start may have another one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dni_runtime.errors import CheckpointError, DamagedError, DataError, UsageError
from dni_runtime.files import closing, load_json, open_folder, opened
from dni_runtime.run.documents.evaluations import Best
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.named import number_of, takes_part
from dni_runtime.spec.replicas import replicas_of

_log = logging.getLogger(__name__)

FORMAT = 3
"""Format of the checkpoints that this version writes and reads."""

_ENDINGS = (".json", ".safetensors")
_HEADER_BYTES = 100_000_000  # what the safetensors library allows
_CHUNK_BYTES = 1 << 20


def tensors_file(part: Path) -> Path:
    """Return the file with a part's tensors; a worker's name may have a dot."""
    return part.with_name(f"{part.name}.safetensors")


def document_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def parts_of(run: RunDir, cut: int, workers: Sequence[str]) -> list[str]:
    """Return those of these workers that took part in the start that wrote a cut."""
    parts = []
    for module, replicas in replicas_of(workers).items():
        counts = {}
        if len(replicas) > 1 or number_of(replicas[0]) > 1:
            with contextlib.suppress(CheckpointError):  # that is said when the part is read
                document = read_document(run.checkpoint(cut, f"{module}.1"))
                counts[module] = document.get("replicas", len(replicas))
        parts += [worker for worker in replicas if takes_part(worker, counts)]
    return parts


def cut_folders(run: RunDir) -> dict[int, Path]:
    """Return the folders of cuts, complete or not, by position, oldest first."""
    folders = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(run.checkpoints) as entries:
        for entry in entries:
            name = entry.name
            if name.isascii() and name.isdigit() and entry.is_dir(follow_symlinks=False):
                folders[int(name)] = Path(entry.path)
    return {cut: folders[cut] for cut in sorted(folders) if folders[cut].name == f"{cut:012d}"}


def written_cuts(run: RunDir, modules: Sequence[str]) -> list[int]:
    """Return the cuts at which every module has written its part, even if damaged, oldest first.

    Each folder is listed once: in a long chain that costs less than one stat per part.
    """
    cuts = []
    for cut, folder in cut_folders(run).items():
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            there = set(os.listdir(folder))
            missing = [module for module in modules if f"{module}.json" not in there]
            if not missing or not {*missing} & {*parts_of(run, cut, modules)}:
                cuts.append(cut)
    return cuts


NOT_OVER = "the last checkpoint is not complete"
"""Why a run has not finished although all its workers have."""


def is_over(run: RunDir, modules: Sequence[str]) -> bool:
    """Whether the newest written cut is the one at the end of the stream."""
    cuts = written_cuts(run, modules)
    with contextlib.suppress(CheckpointError):  # a part is damaged, or has just been removed
        return bool(cuts) and all(
            read_document(run.checkpoint(cuts[-1], worker)).get("over")
            for worker in parts_of(run, cuts[-1], modules)
        )
    return False


def complete_cuts(run: RunDir, modules: Sequence[str], known: Collection[int] = ()) -> list[int]:
    """Return the cuts at which every module's part is finite and of the right size, oldest first.

    Cuts in ``known`` are complete already.
    """
    written = written_cuts(run, modules)
    return [cut for cut in written if cut in known or not any(damage(run, cut, modules))]


def diverged_cuts(run: RunDir, modules: Sequence[str], complete: Collection[int]) -> list[int]:
    """Return the written cuts with weights that are not finite, oldest first.

    Cuts in ``complete`` are finite.
    """
    return [
        cut
        for cut in written_cuts(run, modules)
        if cut not in complete
        and any(
            not _is_finite(read_document(run.checkpoint(cut, worker)))
            for worker in parts_of(run, cut, modules)
        )
    ]


def newest_cut(
    run: RunDir, modules: Sequence[str], *, below: int | None = None
) -> tuple[int, list[DamagedError]]:
    """Return the newest cut that all modules can start from, and the damage of newer ones.

    It is 0 if none was ever written. ``below`` is a damaged cut: only earlier ones count. Raises
    ``DamagedError`` if all of them are damaged, or if none is earlier than ``below``.
    """
    problems: list[DamagedError] = []
    for cut in reversed(written_cuts(run, modules)):
        if below is None or cut < below:
            errors = list(damage(run, cut, modules))
            if not errors:
                return cut, problems
            problems += errors
    if problems or below is not None:
        why = problems[-1].message if problems else f"the checkpoint at {below} is damaged"
        raise DamagedError(
            f"{why}, and no older checkpoint is intact",
            hint="start a new run with 'dnictl up'",
        )
    return 0, []


def damage(run: RunDir, cut: int, modules: Sequence[str]) -> Iterator[DamagedError]:
    """Yield the damage of a cut's parts, as far as their sizes and JSON documents show it."""
    for module in parts_of(run, cut, modules):
        try:
            part = run.checkpoint(cut, module)
            document = read_document(part)
            _check_size(part, document)
            if not _is_finite(document):
                raise DamagedError(f"{named(part)} holds weights that are not finite")
        except DamagedError as error:
            yield error


def verify(run: RunDir, cut: int, modules: Sequence[str]) -> None:
    """Read all parts of a cut and compare them with their checksums; raises ``DamagedError``."""
    for module in parts_of(run, cut, modules):
        part = run.checkpoint(cut, module)
        document = read_document(part)
        _check_size(part, document)
        with reading(part), opened(tensors_file(part)) as file:
            check_sum(part, file, document)


@contextlib.contextmanager
def reading(part: Path) -> Iterator[None]:
    """Add the part's name to read errors; an unavailable file system does not count as damage.

    Raises ``DamagedError`` if a file is missing or the disk cannot read it, else
    ``CheckpointError``.
    """
    try:
        yield
    except OSError as error:
        kind = DamagedError if error.errno in (errno.ENOENT, errno.EIO) else CheckpointError
        raise kind(f"{named(part)} cannot be read: {error}") from None


def read_document(part: Path) -> dict[str, Any]:
    """Return a part's JSON document; raises ``DamagedError`` if it is missing or not an object.

    Other read errors are those of :func:`reading`.
    """
    with reading(part), contextlib.suppress(DataError):
        document = load_json(document_file(part))
        if isinstance(document, dict):
            return document
    raise DamagedError(f"{named(part)} is damaged: {part.name}.json is not a JSON object")


def _is_finite(document: dict[str, Any]) -> bool:
    """Whether the part's weights are finite; with ``on_nan: warn`` they may not be."""
    return bool(document.get("finite", True))


def _check_size(part: Path, document: dict[str, Any]) -> None:
    with reading(part):
        size = tensors_file(part).stat().st_size
    expected = document.get("bytes")
    if size != expected:
        raise DamagedError(
            f"{named(part)} is damaged: {part.name}.safetensors has {size} bytes, not {expected!r}"
        )


def check_sum(part: Path, file: BinaryIO, document: dict[str, Any]) -> None:
    """Compare a part with its checksum; raises ``DamagedError``."""
    digest = _digest(file, document)
    if digest is None or digest != document.get("sha256"):
        raise DamagedError(f"{named(part)} is damaged: its SHA-256 is not the one in its JSON")


def sealed(data: bytes, document: dict[str, Any]) -> str:
    """Return a document as JSON text, with a checksum over itself and its safetensors ``data``."""
    document = json.loads(json.dumps(document))  # as it will be read: keys are strings
    return json.dumps(document | {"sha256": _digest(io.BytesIO(data), document)})


def _digest(file: BinaryIO, document: dict[str, Any]) -> str | None:
    """SHA-256 over a safetensors header without its metadata, a document, and the tensors' data.

    None if the file is not in this format. hashlib lets other threads run meanwhile.
    """
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(min(length, _HEADER_BYTES)))
        header.pop("__metadata__", None)
    except (ValueError, AttributeError, RecursionError):
        return None
    rest = {key: value for key, value in document.items() if key != "sha256"}
    sha256 = hashlib.sha256(json.dumps([header, rest], sort_keys=True).encode())
    while chunk := file.read(_CHUNK_BYTES):
        sha256.update(chunk)
    return sha256.hexdigest()


def named(part: Path) -> str:
    """Return the name of a part, or of a snapshot, for messages."""
    if part.parent.name == "snapshots":
        return f"the snapshot of module {part.name!r} ({str(part)!r})"
    return f"the part of module {part.name!r} in checkpoint {int(part.parent.name)} ({str(part)!r})"


def forget(run: RunDir, modules: Sequence[str], unwanted: Callable[[int], bool]) -> None:
    """Remove some modules' parts of some cuts (JSON first, so that no partial one looks whole)."""
    for cut, folder in cut_folders(run).items():
        if not unwanted(cut):
            continue
        # Another module may just have created a folder that holds none of these parts.
        if _remove(folder, [f"{m}{ending}" for ending in _ENDINGS for m in modules]):
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails while it holds other modules' parts


def _remove(folder: Path, names: Sequence[str]) -> int:
    """Remove files of a folder, which may have become a link meanwhile; return how many."""
    removed = 0
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        closing(open_folder(folder)) as descriptor,
    ):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
                removed += 1
    return removed


def remove_temporaries(run: RunDir, modules: Collection[str]) -> None:
    """Remove half-written files of these modules' killed workers.

    The caller makes sure that no worker of these modules is running.
    """
    beginnings = tuple(f".{module}{ending}." for module in modules for ending in _ENDINGS)
    for folder in (*cut_folders(run).values(), run.root / "snapshots"):
        names = [name for name in os.listdir(folder) if name.startswith(beginnings)]
        _remove(folder, names)
        if names and folder.parent == run.checkpoints:
            with contextlib.suppress(OSError):
                folder.rmdir()


def best_cut(run: RunDir) -> int | None:
    """Return the position of the best checkpoint, if one is selected."""
    best = Best.load(run.best)
    return None if best is None else best.cut


def choose_cut(
    run: RunDir, modules: Sequence[str], choice: str | None = None, *, force: bool = False
) -> int:
    """Find the checkpoint that a user asks for, and verify its files.

    ``choice`` is its number, ``newest`` or ``best``; by default the best if the chain selects one,
    else the newest. ``force``: if none is intact, take the newest, whose weights may not be finite.
    The damage of newer checkpoints, which are passed over, is logged as a warning.
    """
    cuts = written_cuts(run, modules)
    try:
        newest, damaged = newest_cut(run, modules)
    except DamagedError:
        if not force:
            raise
        newest, damaged = cuts[-1], []
    if not cuts:
        raise CheckpointError(
            f"run {run.root.name!r} has no complete checkpoint yet",
            hint="the end of an epoch writes one (wait: 'dnictl wait'), and so does 'dnictl stop'; "
            "a run that has ended before that goes on by 'dnictl resume'",
        )
    best = best_cut(run)
    named = {"newest": newest, "best": best, None: newest if best is None else best}
    cut = named.get(choice, choice)
    if str(cut) not in map(str, cuts):
        no_best = "best checkpoint: the chain has no 'selection'"
        what = no_best if cut is None else f"checkpoint {cut}"
        raise UsageError(f"no complete {what}; there are: {', '.join(map(str, cuts))}")
    cut = int(str(cut))
    try:
        verify(run, cut, modules)
    except DamagedError as error:
        others = ", ".join(str(other) for other in cuts if other != cut)
        hint = f"take another one with --from: {others}" if others else None
        raise DamagedError(error.message, hint=hint) from None
    for problem in damaged if cut == newest else ():
        _log.warning("%s; using checkpoint %d", problem, cut)
    return cut


def check_cut(run: RunDir, modules: Sequence[str], cut: str) -> None:
    """Refuse to resume from a missing or damaged checkpoint; ``auto`` is not checked."""
    if cut == "auto":
        return
    if not cut.isdecimal() or int(cut) not in written_cuts(run, modules):
        there = ", ".join(map(str, complete_cuts(run, modules))) or "none"
        raise UsageError(f"there is no complete checkpoint {cut!r}; there are: {there}")
    verify(run, int(cut), modules)
