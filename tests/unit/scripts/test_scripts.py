"""What holds for all scripts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


FILES = [p for folder in (SCRIPTS, SCRIPTS / "experiments") for p in folder.iterdir()]


@pytest.mark.parametrize("path", [p for p in FILES if p.is_file()], ids=lambda p: p.name)
def test_programs_can_be_executed_and_nothing_else(path: Path) -> None:
    assert os.access(path, os.X_OK) == path.read_bytes().startswith(b"#!")
