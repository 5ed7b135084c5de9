"""Schedules of disasters, and what the simulation finds where a mend is taken out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SEEDS = 400


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "simulate.py"), "--json", *options],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.timeout(600)
def test_what_must_hold_holds() -> None:
    """Other seeds in each run of CI would find more, and fail where nothing has changed."""
    done = simulate("--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["schedules"] == SEEDS


@pytest.mark.parametrize(
    ("mutation", "seed", "violated"),
    [
        ("gradients-once", 167, "the watchdog has said module 'a' waits for gradients"),
        ("newest-read", 211, "the watchdog has said module 'a' waits for room"),
        ("narrow-gaps", 186, "the link is down"),
        ("own-cuts", 199, "c has counted"),
        ("exit-code-0", 42, "a has never trained"),
        ("steps-unasked", 68, "the worker of module 'c' has not reported"),
    ],
)
def test_a_mend_that_is_taken_out_is_missed(mutation: str, seed: int, violated: str) -> None:
    """The first three were runs that hung for ever; the product's own watchdog sees them, too."""
    done = simulate("--first", str(seed), "--seeds", "1", "--without", mutation)
    assert done.returncode == 1, done.stderr
    (failure,) = json.loads(done.stdout)["failed"]
    assert violated in failure["violated"]
    assert "the watchdog has said nothing" not in failure["violated"]


def test_a_seed_replays() -> None:
    """The same seed is the same schedule, to the last operation."""
    runs = [json.loads(simulate("--first", "7", "--seeds", "3").stdout) for _ in range(2)]
    assert runs[0]["operations"] == runs[1]["operations"] > 0
