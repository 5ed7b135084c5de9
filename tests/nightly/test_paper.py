"""Scripts that measure on the first images of real MNIST, in their smallest forms."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from dni_runtime.data import describe
from dni_runtime.spec import DataSpec
from tests.e2e.conftest import missing, run

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "scripts" / "experiments"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the first images of the real data."""
    done = run([sys.executable, ROOT / "scripts" / "fetch-mnist", ROOT / "build" / "mnist"])
    if "cannot download" in done.stderr:
        missing(done.stderr)
    assert done.returncode == 0, done.stderr
    whole, part = Path(done.stdout.splitlines()[-1]), tmp_path_factory.mktemp("mnist")
    info = describe(DataSpec(dataset="mnist", path=str(whole)), part)
    assert (info.train_samples, info.eval_samples) == (60_000, 10_000)
    for file in whole.glob("*-ubyte"):
        count = 20_000 if file.name.startswith("train") else 2_000
        head, size = (16, 28 * 28) if "images" in file.name else (8, 1)
        kept = file.read_bytes()[: head + count * size]
        (part / file.name).write_bytes(kept[:4] + struct.pack(">I", count) + kept[8:])
    return part


def test_one_depth(mnist: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, EXPERIMENTS / "reproduce_paper.py", "--layers", "2", "--seeds", "1",
        "--epochs", "1", "--methods", "none,cDNI", "--mnist", mnist, "--out", tmp_path / "out",
        "--figure", tmp_path / "curves.png",
    ]  # fmt: skip
    done = run(command)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| ")]
    accuracy = {name.strip(): float(cell.split()[0]) for name, cell in rows[1:]}
    assert list(accuracy) == ["backprop", "none", "cDNI"]
    assert accuracy["none"] < accuracy["cDNI"]
    again = run(command)
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1], "nothing is trained again"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_growth(tmp_path: Path) -> None:
    figures = tmp_path / "growth.json"
    command = [
        sys.executable, EXPERIMENTS / "bench_growth.py", "--modules", "2", "--windows", "2",
        "--seconds", "1", "--warmup", "1", "--steps", "100", "--json", figures,
    ]  # fmt: skip
    done = run(command)
    assert done.returncode == 0, done.stderr
    document = json.loads(figures.read_text())
    assert [row["modules"] for row in document["growth"]] == [2]
    assert all(row["worker_us"] > row["step_us"] > 0 for row in document["growth"])
    assert all(share < 0.05 for share in document["idle"].values()), "whoever is blocked must sleep"


def test_types_on_the_wire(mnist: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, EXPERIMENTS / "compare_dtypes.py", "--layers", "2", "--seeds", "1",
        "--epochs", "1", "--interfaces", "delayed", "--dtypes", "int8", "--mnist", mnist,
    ]  # fmt: skip
    done = run([*command, "--results", tmp_path / "trained.jsonl"])
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    cells = {row[0].strip(): [cell.split()[0] for cell in row[1:]] for row in rows[1:]}
    assert (cells["float32"][0], cells["int8"][0]) == ("262,144", "65,540")
    plain, narrow = float(cells["float32"][1]), float(cells["int8"][3])
    assert plain > 90
    assert abs(plain - narrow) < 1
    again = run([*command, "--results", tmp_path / "trained.jsonl"])
    assert (again.stdout, again.stderr) == (done.stdout, ""), "nothing is trained again"
    errors = run([*command, "--errors"])
    assert errors.returncode == 0, errors.stderr
    assert errors.stdout.splitlines()[-1].startswith("| int8 | ")


def test_time_to_accuracy(mnist: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [
        sys.executable, EXPERIMENTS / "time_to_accuracy.py", "--network", "mlp-256",
        "--contenders", "gpipe-1,local-sgd-8", "--delay-ms", "3",
        "--target", "0.9", "--every", "20", "--seeds", "1", "--mnist", mnist, "--json", figures,
    ]  # fmt: skip
    done = run(command)
    if done.returncode == 77:
        missing(done.stderr)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["contenders"]
    assert [(row["name"], row["delay_ms"]) for row in rows] == [
        ("gpipe-1", 3), ("local-sgd-8", 3),
    ]  # fmt: skip
    for row in rows:
        (training,) = row["trainings"]
        last = training["evaluations"][-1]
        assert last["accuracy"] >= 0.9
        assert training["batches"] == last["batches"] <= 200
        assert training["seconds"] == last["train_s"] > 0
        assert last["batches"] % (24 if row["name"] == "local-sgd-8" else 20) == 0
        seconds = [one["train_s"] for one in training["evaluations"]]
        assert seconds == sorted(seconds)
    assert "sooner than gpipe-1" in done.stdout


def test_bits_per_character(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(Path(__file__).read_bytes() * 8)
    figures = tmp_path / "figures.json"
    command = [
        sys.executable, EXPERIMENTS / "time_to_accuracy.py", "--network", "lm", "--modules",
        "2", "--contenders", "delayed", "--target", "6", "--every", "5", "--seeds", "1",
        "--text", text, "--json", figures,
    ]  # fmt: skip
    done = run(command)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["contenders"]
    (training,) = row["trainings"]
    bits = [one["bits_per_character"] for one in training["evaluations"]]
    assert bits[-1] <= 6 < bits[0] < 10
