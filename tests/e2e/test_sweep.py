"""``dnictl sweep`` with real processes: the table, what goes on, and the best run's model."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from tests.e2e.conftest import ENDS, PAIR, Dnictl, Site, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_sweep(tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text(PAIR % 1)
    shell = Dnictl(tmp_path, {"OMP_NUM_THREADS": "1"})
    command = ("sweep", "lr=1e-5,5e-3", "seed=3..4", "--name", "s", "--backend", "process")
    done = shell.run(*command, "--jobs", "2")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["run", "state", "lr", "seed", "epoch", "accuracy"]
    assert {line[2] for line in lines[1:3]} == {"0.005"}, "the best ones come first"
    accuracies = [float(line[-1]) for line in lines[1:]]
    assert accuracies == sorted(accuracies, reverse=True)
    best = lines[1][0]
    assert f"dnictl export {best} -o model.safetensors" in done.stderr
    shell.run("export", best, "-o", "model.safetensors")
    listed = shell.run("ps", "--settings").stdout.splitlines()
    assert listed[0].split()[:4] == ["run", "state", "seed", "lr"]
    assert listed[1].split()[:4] == ["s-1-lr1e-05-seed3", "finished", "3", "1e-05"]

    shutil.rmtree(tmp_path / "runs" / "s-4-lr0.005-seed4")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("s-*/events.jsonl")}
    found = json.loads(shell.run(*command, "--json").stdout)
    assert [run["state"] for run in found["runs"]] == ["finished"] * 4
    values = {run["run"]: run["value"] for run in found["runs"]}
    for name, *_, accuracy in lines[1:]:
        if name != "s-4-lr0.005-seed4":
            assert values[name] == pytest.approx(float(accuracy), abs=1e-4)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items()), "no second time"
    (tmp_path / "chain.yaml").write_text(PAIR % 2)
    assert "another version of the chain" in shell.run(*command, expect=64).stderr


def test_ctrl_c_stops_what_is_active_and_the_same_command_goes_on(site: Site) -> None:
    site.write(8, slow=True, chain=PAIR)
    command = ("sweep", "seed=1..2", "--name", "s", "--backend", "process")
    process = site.start(*command)
    first, second = (RunDir(site.folder / "runs" / name) for name in ("s-1-seed1", "s-2-seed2"))
    eventually("a checkpoint", lambda: complete_cuts(first, ENDS))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "--name s" in err
    assert RunState.read(first).phase == "stopped"
    assert not second.root.exists()
    site.run(*command)
    assert [RunState.read(run).phase for run in (first, second)] == ["finished"] * 2
    assert (RunState.read(first).attempt, RunState.read(second).attempt) == (2, 1)
