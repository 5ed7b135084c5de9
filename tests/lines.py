"""Lines that programs have written, as tests read them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of a file; incomplete and damaged lines are left out."""
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    with contextlib.suppress(ValueError):  # a full disk can cut a line short
                        yield json.loads(line)
    except FileNotFoundError:
        return
