"""Where releases lie that were made or pulled here, each also as a run (``release/store.py``)."""

from __future__ import annotations

import re
from pathlib import Path

from dni_runtime.files import xdg_folder

_NAME = re.compile(r"([a-z0-9]+(?:[._-]+[a-z0-9]+)*):([A-Za-z0-9_][A-Za-z0-9._-]{0,127})", re.ASCII)


def parse_name(text: str) -> tuple[str, str] | None:
    """Return name and version of a release; None if that is not what ``text`` is."""
    match = _NAME.fullmatch(text)
    return None if match is None else (match[1], match[2])


def store_folder() -> Path:
    """Return the folder of releases."""
    return xdg_folder("XDG_DATA_HOME", ".local/share") / "releases"


def unpacked(name: str, version: str) -> Path:
    """Return the run directory of a release, whether it is there or not."""
    return store_folder() / name / version
