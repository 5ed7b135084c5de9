"""The cuts of a run on disk: which there are, which are whole, and how that is told.

This is the only module that lists ``checkpoints/``. A cut is a folder there whose name is a
position in the stream, in twelve digits; all else in there is left
alone. A module's *part* of a cut is ``MODULE.safetensors`` and ``MODULE.json``. The JSON is written
last, and says the size of the other file (``bytes``) and a sum over both (``sha256``). Parts of
earlier versions say neither, and are taken as they are.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dni_runtime.errors import CheckpointError, DamagedError, UsageError
from dni_runtime.rundir import RunDir, read_json

FORMAT = 3
"""The format of the checkpoints that are written."""

READABLE = (2, FORMAT)
"""The formats that can be read (``worker/checkpoint.py`` knows how they differ)."""

_HEADER_BYTES = 100_000_000  # what the safetensors library allows
_CHUNK_BYTES = 1 << 20


def cut_folders(run: RunDir) -> dict[int, Path]:
    """The folders of cuts, complete or not, by position, oldest first."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(run.checkpoints) as entries:
        for entry in entries:
            name = entry.name
            if name.isascii() and name.isdigit() and entry.is_dir():
                found[int(name)] = Path(entry.path)
    return {cut: found[cut] for cut in sorted(found) if found[cut].name == f"{cut:012d}"}


def written_cuts(run: RunDir, modules: Sequence[str]) -> list[int]:
    """Cuts at which every module has written its part, damaged or not, oldest first.

    Each folder is listed once: in a long chain that costs less than a look at each part.
    """
    parts, found = {f"{module}.json" for module in modules}, []
    for cut, folder in cut_folders(run).items():
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            if parts <= set(os.listdir(folder)):
                found.append(cut)
    return found


def complete_cuts(run: RunDir, modules: Sequence[str], known: Collection[int] = ()) -> list[int]:
    """Cuts at which every module has a part of the right size that is finite, oldest first.

    Args:
        run: The run directory.
        modules: All modules.
        known: Cuts that need not be looked at again.
    """
    written = written_cuts(run, modules)
    return [cut for cut in written if cut in known or not any(damage(run, cut, modules))]


def diverged_cuts(run: RunDir, modules: Sequence[str], complete: Collection[int]) -> list[int]:
    """Cuts that are written, but are not finite, oldest first.

    Args:
        run: The run directory.
        modules: All modules.
        complete: Cuts that are known to be.
    """
    return [
        cut
        for cut in written_cuts(run, modules)
        if cut not in complete
        and any(not _is_finite(read_document(run.checkpoint(cut, one))) for one in modules)
    ]


def newest_cut(
    run: RunDir, modules: Sequence[str], *, below: int | None = None
) -> tuple[int, list[DamagedError]]:
    """The cut that all modules can begin at.

    Args:
        run: The run directory.
        modules: All modules.
        below: Only cuts before this one count: it has been found damaged.

    Returns:
        The newest complete cut, 0 where none was ever written; and what is wrong with newer ones.

    Raises:
        DamagedError: All that were written are damaged.
    """
    problems: list[DamagedError] = []
    for cut in reversed(written_cuts(run, modules)):
        if below is None or cut < below:
            found = list(damage(run, cut, modules))
            if not found:
                return cut, problems
            problems += found
    if problems or below is not None:
        why = problems[-1].message if problems else f"the checkpoint at {below} is damaged"
        raise DamagedError(
            f"{why}, and there is no older one that is whole",
            hint="start a new run with 'dnictl up'",
        )
    return 0, []


def damage(run: RunDir, cut: int, modules: Sequence[str]) -> Iterator[DamagedError]:
    """What is wrong with the parts of a cut, as far as their sizes and documents tell."""
    for module in modules:
        try:
            part = run.checkpoint(cut, module)
            document = read_document(part)
            _check_size(part, document)
            if not _is_finite(document):
                raise DamagedError(f"{named(part)} holds weights that are not finite")
        except DamagedError as error:
            yield error


def verify(run: RunDir, cut: int, modules: Sequence[str]) -> None:
    """Read all parts of a cut, and compare them with their sums.

    Raises:
        DamagedError: One is damaged.
    """
    for module in modules:
        part = run.checkpoint(cut, module)
        document = read_document(part)
        _check_size(part, document)
        with reading(part), part.with_suffix(".safetensors").open("rb") as file:
            check_sum(part, file, document)


@contextlib.contextmanager
def reading(part: Path) -> Iterator[None]:
    """Say of which part something could not be read; a share that is away is no damage.

    Raises:
        DamagedError: A file is missing, or the disk cannot read it.
        CheckpointError: A file cannot be read for another reason.
    """
    try:
        yield
    except OSError as error:
        lasting = error.errno in (errno.ENOENT, errno.EIO)
        raise (DamagedError if lasting else CheckpointError)(
            f"{named(part)} cannot be read: {error}"
        ) from None


def read_document(part: Path) -> dict[str, Any]:
    """What a part's JSON says.

    Raises:
        DamagedError: It is missing or no JSON object.
        CheckpointError: It cannot be read for another reason.
    """
    with reading(part):
        text = part.with_suffix(".json").read_bytes()
    with contextlib.suppress(ValueError):
        document = json.loads(text)
        if isinstance(document, dict):
            return document
    raise DamagedError(f"{named(part)} is damaged: {part.name}.json is not a JSON object")


def _is_finite(document: dict[str, Any]) -> bool:
    """Whether the module was, as far as it said (``on_nan: warn``)."""
    return bool(document.get("finite", True))


def _check_size(part: Path, document: dict[str, Any]) -> None:
    with reading(part):
        size = part.with_suffix(".safetensors").stat().st_size
    wanted = document.get("bytes", size)
    if size != wanted:
        raise DamagedError(
            f"{named(part)} is damaged: {part.name}.safetensors has {size} bytes, not {wanted}"
        )


def check_sum(part: Path, file: BinaryIO, document: dict[str, Any]) -> None:
    """Compare tensors and document with their sum, where there is one.

    Raises:
        DamagedError: They differ.
    """
    if "sha256" in document and _digest(file, document) != document["sha256"]:
        raise DamagedError(f"{named(part)} is damaged: its SHA-256 is not the one in its JSON")


def sealed(data: bytes, document: dict[str, Any]) -> str:
    """A document as JSON text, with the sum of itself and its tensors.

    Args:
        data: The tensors, in the format of safetensors.
        document: The rest.
    """
    document = json.loads(json.dumps(document))  # as it will be read: keys are texts
    return json.dumps(document | {"sha256": _digest(io.BytesIO(data), document)})


def _digest(file: BinaryIO, document: dict[str, Any]) -> str | None:
    """SHA-256 of a header of safetensors without its metadata, a document, and the tensors' data.

    hashlib lets other threads run meanwhile.

    Returns:
        The sum; None where the file is not in this format.
    """
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(min(length, _HEADER_BYTES)))
        header.pop("__metadata__", None)
    except (ValueError, AttributeError):
        return None
    rest = {key: value for key, value in document.items() if key != "sha256"}
    sha256 = hashlib.sha256(json.dumps([header, rest], sort_keys=True).encode())
    while chunk := file.read(_CHUNK_BYTES):
        sha256.update(chunk)
    return sha256.hexdigest()


def named(part: Path) -> str:
    """A part's name in messages; that of a snapshot, too."""
    if part.parent.name == "snapshots":
        return f"the snapshot of module {part.name!r} ({str(part)!r})"
    return f"the part of module {part.name!r} in checkpoint {int(part.parent.name)} ({str(part)!r})"


def forget(run: RunDir, modules: Sequence[str], unwanted: Callable[[int], bool]) -> None:
    """Remove some modules' parts of some cuts (JSON first, so that no half is taken for whole)."""
    for cut, folder in cut_folders(run).items():
        if not unwanted(cut):
            continue
        found = False
        for name in [f"{m}{ending}" for ending in (".json", ".safetensors") for m in modules]:
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()
                found = True
        # A folder without any of these parts may be one that another has just made for its own.
        if found:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails while other modules' parts are there


def remove_temporaries(run: RunDir, modules: Collection[str]) -> None:
    """Remove what workers of these modules that were killed have left half-written.

    The caller makes sure that no worker of these modules writes at this moment.
    """
    for folder in (*cut_folders(run).values(), run.root / "snapshots"):
        left = [
            folder / name
            for name in os.listdir(folder)
            if name.startswith(".") and name[1:].partition(".")[0] in modules
        ]
        for path in left:
            path.unlink(missing_ok=True)
        if left and folder.parent == run.checkpoints:
            with contextlib.suppress(OSError):
                folder.rmdir()


def choose_cut(
    run: RunDir, modules: Sequence[str], wanted: str | None = None, *, force: bool = False
) -> tuple[int, list[DamagedError]]:
    """The checkpoint that a user means, after a look at its files.

    Args:
        run: The run directory.
        modules: The modules, head first.
        wanted: Its number, ``newest`` or ``best``; by default the best if the chain selects one,
            else the newest.
        force: Take the newest even if its weights are not finite.

    Returns:
        Its stream position, and what is wrong with newer ones that were passed over.

    Raises:
        CheckpointError: There is none yet.
        DamagedError: Its files are damaged.
        UsageError: There is none of that name.
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
            hint="checkpoints are written at the end of an epoch, and by 'dnictl stop'",
        )
    best = read_json(run.best) or {}
    named = {"newest": newest, "best": best.get("cut"), None: best.get("cut", newest)}
    cut = named.get(wanted, wanted)
    if str(cut) not in map(str, cuts):
        no_best = "best checkpoint: the chain has no 'selection'"
        what = no_best if cut is None else f"checkpoint {cut}"
        raise UsageError(f"no complete {what}; there are: {', '.join(map(str, cuts))}")
    cut = int(str(cut))
    try:
        verify(run, cut, modules)
    except DamagedError as error:
        others = ", ".join(str(one) for one in cuts if one != cut)
        hint = f"take another one with --from: {others}" if others else None
        raise DamagedError(error.message, hint=hint) from None
    return cut, damaged if cut == newest else []


def check_cut(run: RunDir, modules: Sequence[str], cut: str) -> None:
    """Refuse to resume from a checkpoint that is not there, or damaged.

    Args:
        run: The run directory.
        modules: The modules, head first.
        cut: Its number; ``auto``, the newest, is not looked at.

    Raises:
        DamagedError: Its files are damaged.
        UsageError: There is no such checkpoint.
    """
    if cut == "auto":
        return
    if not cut.isdecimal() or int(cut) not in written_cuts(run, modules):
        there = ", ".join(map(str, complete_cuts(run, modules))) or "none"
        raise UsageError(f"there is no complete checkpoint {cut!r}; there are: {there}")
    verify(run, int(cut), modules)
