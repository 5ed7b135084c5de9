"""Paths of data sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dni_runtime.errors import DataError
from dni_runtime.spec import DataSpec


def resolve(path: str, base: Path) -> Path:
    """Return ``data.path`` as an absolute path: expand ``~``, start relative paths at ``base``."""
    return (base / Path(path).expanduser()).resolve()


def find_folder(
    spec: DataSpec, base: Path, *, files: Iterable[Sequence[str]], known: Sequence[str], hint: str
) -> Path:
    """Find the folder that holds all files of a data set, each by one of several names.

    It is ``data.path`` if that is set, or a relative folder of ``known`` below it; else an absolute
    one of ``known``.
    """
    if spec.path is not None:
        root = resolve(spec.path, base)
        folders = [root, *(root / name for name in known if not Path(name).is_absolute())]
    else:
        folders = [Path(name) for name in known if Path(name).is_absolute()]
    if not folders:
        raise DataError(
            f"data set {spec.dataset!r} needs 'data.path', the folder of its files", hint=hint
        )
    seen: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            seen.append(f"{folder} ({'not a folder' if folder.exists() else 'does not exist'})")
            continue
        missing = [n[0] for n in files if not any((folder / name).is_file() for name in n)]
        if not missing:
            return folder
        seen.append(f"{folder} (lacks {', '.join(missing)})")
    raise DataError(
        f"the files of data set {spec.dataset!r} were not found; looked in {'; '.join(seen)}",
        hint=hint,
    )


def existing(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of ``names`` that is a file in ``folder``."""
    return next(folder / name for name in names if (folder / name).is_file())
