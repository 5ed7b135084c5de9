"""``scripts/experiments/bench_peers.py`` and ``bench_trees.py`` in their smallest form."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import missing, run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "experiments" / "bench_peers.py"

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
"""What is measured runs at its full speed."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_chain_and_its_peers(tmp_path: Path) -> None:
    command = [
        sys.executable, SCRIPT, "--network", "mlp-256", "--modules", "2",
        "--contenders", "1f1b-4,delayed", "--repetitions", "1", "--seconds", "1",
        "--warmup", "0.5", "--delay-ms", "3",
        "--json", tmp_path / "found.json", "--plot", tmp_path / "found.png",
    ]  # fmt: skip
    done = run(command, environ=ENVIRONMENT)
    if done.returncode == 77:
        missing(done.stderr)
    assert done.returncode == 0, done.stderr
    (slow,) = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert slow["delay_ms"] == 3
    assert slow["measured"]["rtt_ms"] >= 6
    assert slow["best_peer"] == "1f1b-4"
    rows = slow["contenders"]
    assert [(row["name"], len(row["cores"]), row["computes"]) for row in rows] == [
        ("1f1b-4", 2, "backprop"),
        ("delayed", 2, "late gradients"),
    ]
    for row in rows:
        assert row["error"] is None
        assert row["samples_per_s"]["median"] > 0
        assert row["cpu_ms_per_sample"]["median"] > 0
        assert row["runs"][0]["details"]["link"]["bytes"][0] > 1e5, "it went through the slow line"
    assert len(rows[-1]["runs"][0]["details"]["modules"]) == 2
    assert (tmp_path / "found.png").stat().st_size > 1000


def test_two_trees_in_turns() -> None:
    script = SCRIPT.with_name("bench_trees.py")
    how = ["--network=mlp-256", "--contenders=delayed", "--seconds=4", "--at-least=100"]
    background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]  # as a shell's "&" starts it
    done = run([*background, sys.executable, script, ROOT, ROOT, *how], environ=ENVIRONMENT)
    assert done.returncode == 1, "a ratio below what is asked"
    assert re.match(r"delayed +rate [0-9.]+ \(quartiles .* of 2 turns\)", done.stdout), done.stderr
