"""``scripts/experiments/bench_start.py`` in its smallest form."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "experiments" / "bench_start.py"


def test_a_row_for_each_backend(tmp_path: Path) -> None:
    options = ["--modules", "3", "--backends", "process", "--repetitions", "1"]
    done = run([sys.executable, SCRIPT, *options, "--folder", tmp_path])
    assert done.returncode == 0, done.stderr
    headings, _, row = done.stdout.splitlines()
    assert headings.startswith("| backend | start (s) |")
    found = map(float, re.findall(r"\d+(?:\.\d)?", row))
    start, placed, loaded, restart, up, down, stop, *parts, memory, _pss, _cpu = found
    assert 0 < placed <= loaded <= start  # rounded: forks listen at once
    assert 0.5 < restart < 60  # after a backoff of half a second
    assert 0 < up < 60
    assert 0 < down < 60
    assert 0 < stop < 60
    launch, imported, load, connect = parts
    assert 0 <= imported < start  # the workers are forks of a process that has imported torch
    assert all(0 <= part < start for part in (launch, load, connect))
    assert memory > 50
    assert "process" in row


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    done = run([sys.executable, SCRIPT, "--backends", "kubernetes", "--folder", tmp_path])
    assert done.returncode == 1
    assert "there are process, apptainer, slurm, slurm+apptainer" in done.stderr
