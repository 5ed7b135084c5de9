"""The page about callbacks: its classes are told what happens in runs, by the real packages."""

from __future__ import annotations

import csv
import re
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest

from dni_runtime import Run
from dni_runtime.run.cuts import written_cuts
from tests.e2e.conftest import CHAIN, Site, missing

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).resolve().parents[2] / "docs" / "callbacks.md"
ALL = """\
callbacks:
  - broken:Broken
  - broken:Leaves
  - csv_file:CsvFile
  - {import: "mlflow_tracker:Mlflow", args: {experiment: digits}}
  - {import: "trackio_tracker:Trackio", args: {project: digits}}
"""
BROKEN = """
import sys
from dni_runtime import Callback

class Leaves(Callback):
    def on_evaluation(self, evaluation):
        sys.exit("enough")

class Broken(Callback):
    def on_evaluation(self, evaluation):
        raise ValueError("nobody listens")

    def on_checkpoint(self, cut, folder):
        with open("cuts", "a") as file:
            file.write(f"{cut} {folder}\\n")
"""


def write(site: Site, callbacks: str, epochs: int = 3, chain: str = CHAIN) -> Path:
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (site.folder / name).write_text(text)
    (site.folder / "broken.py").write_text(BROKEN)
    return site.write(epochs, callbacks, chain=chain)


@pytest.mark.timeout(300)
def test_trackers_get_each_evaluation(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mlflow", "trackio"):
        if find_spec(package) is None:
            missing(f"the package {package} is not installed")
    folder = site.folder / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    chain = CHAIN.replace("flatten: true", "flatten: true, validation: 0.2")
    site.run("up", write(site, ALL, chain=chain), "--backend", "process")
    run = Run.open(site.latest.root)
    curve = [(one.step, one.figures["accuracy"]) for one in run.status().evaluations]
    assert len(curve) == 3
    with (site.folder / f"{site.latest.root.name}.csv").open(newline="") as file:
        *rows, test = csv.DictReader(file)
    assert (test["kind"], {row["kind"] for row in rows}) == ("test", {"eval"})
    assert [(int(row["step"]), float(row["accuracy"])) for row in rows] == curve

    (metric,) = site.folder.glob("mlruns/*/*/metrics/eval_accuracy")
    lines = [line.split() for line in metric.read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in lines] == curve
    assert (metric.parents[1] / "params" / "epochs").read_text() == "3"
    assert "status: 3" in (metric.parents[1] / "meta.yaml").read_text()  # FINISHED

    with sqlite3.connect(folder / "digits.db") as database:
        (count,) = database.execute("SELECT count(*) FROM metrics").fetchone()
    database.close()
    assert count == 4

    told = [line.split() for line in (site.folder / "cuts").read_text().splitlines()]
    assert [int(Path(folder).name) for _, folder in told] == [int(cut) for cut, _ in told]
    assert int(told[-1][0]) == written_cuts(run.directory, run.modules)[-1]

    failures = [one for one in run.events() if one.event == "callback_failed"]
    assert [(one.what, one.error) for one in failures] == [
        ("broken:Broken", "ValueError: nobody listens"),
        ("broken:Leaves", "SystemExit: enough"),
    ]


@pytest.mark.timeout(300)
def test_a_resumed_run_tells_only_what_is_new(site: Site) -> None:
    site.run(
        "up",
        write(site, "callbacks: ['csv_file:CsvFile']", epochs=40),
        "--backend",
        "process",
        "-d",
    )
    site.wait_for_checkpoint()
    site.run("stop")
    site.run("resume")
    with (site.folder / f"{site.latest.root.name}.csv").open(newline="") as file:
        epochs = [int(row["epoch"]) for row in csv.DictReader(file)]
    assert sorted(set(epochs)) == list(range(1, 41))
    assert len(epochs) - 40 <= 1  # one may have been on its way when the run was stopped


def test_what_is_wrong_is_said_before(site: Site) -> None:
    path = write(site, "callbacks: ['csv_file:Csv']")
    assert "callbacks[0]" in site.run("validate", path, expect=78).stderr
    path = write(site, "callbacks: [{import: 'csv_file:CsvFile', args: {path: a}}]")
    assert "has no keyword 'path'" in site.run("validate", path, expect=78).stderr
    path = write(site, "callbacks: ['csv_file:CsvFile']")
    assert "no supervisor" in site.run("mpi", path, "--backend", "process", expect=64).stderr
