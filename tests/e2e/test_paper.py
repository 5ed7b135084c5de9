"""The script that reproduces the paper's experiments, in its smallest form on real MNIST."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dni_runtime.data import describe
from dni_runtime.spec import DataSpec
from tests.e2e.conftest import missing, run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def mnist() -> Path:
    """The folder of the real data."""
    done = run([sys.executable, ROOT / "scripts" / "fetch-mnist", ROOT / "build" / "mnist"])
    if "cannot download" in done.stderr:
        missing(done.stderr)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def test_one_depth(mnist: Path, tmp_path: Path) -> None:
    info = describe(DataSpec(dataset="mnist", path=str(mnist)), tmp_path)
    assert (info.train_samples, info.eval_samples) == (60_000, 10_000)
    command = [
        sys.executable, ROOT / "scripts" / "reproduce_paper.py", "--layers", "2", "--seeds", "1",
        "--epochs", "2", "--methods", "none,cDNI", "--mnist", mnist, "--out", tmp_path / "out",
    ]  # fmt: skip
    done = run(command)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| ")]
    accuracy = {name.strip(): float(cell.split()[0]) for name, cell in rows[1:]}
    assert list(accuracy) == ["backprop", "none", "cDNI"]
    assert accuracy["none"] < accuracy["cDNI"]
    again = run(command)
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1], "nothing is trained again"
