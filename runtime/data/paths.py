"""Where the files of a data set lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dni_runtime.errors import DataError
from dni_runtime.spec import DataSpec


def resolve(path: str, base: Path) -> Path:
    """``data.path`` as an absolute path: ``~`` is expanded, relative paths start at ``base``."""
    return (base / Path(path).expanduser()).resolve()


def find_folder(
    spec: DataSpec, base: Path, *, files: Iterable[Sequence[str]], known: Sequence[str], hint: str
) -> Path:
    """The folder that holds all files of a data set.

    Args:
        spec: The data set; its ``path`` is where to look, if it is given.
        base: Folder of ``chain.yaml``.
        files: For each file the names that it may have.
        known: Folders to look in, beside ``path`` and when there is no ``path``; relative ones are
            subfolders of ``path``.
        hint: Where the files come from.

    Raises:
        DataError: No folder has them all; names the folders and the files that are missing.
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
            seen.append(f"{folder} ({'is no folder' if folder.exists() else 'is not there'})")
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
    """The first of ``names`` that is a file in ``folder``."""
    return next(folder / name for name in names if (folder / name).is_file())
