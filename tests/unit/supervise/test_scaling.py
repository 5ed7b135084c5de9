"""How many replicas are wanted, and what the supervisor's scaler makes of it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dni_runtime.files import append_line
from dni_runtime.run.documents.requests import Scale
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from dni_runtime.supervise.journal import Journal
from dni_runtime.supervise.scaling import Scaler, ask_for, lift_limits, wanted_replicas
from tests.lines import read_lines

WORKERS = ["a", "b.1", "b.2", "b.3", "c"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def scaler_of(run: RunDir, elastic: dict[str, int]) -> tuple[Scaler, RunState]:
    state = RunState.begin("process", 1, WORKERS)
    return Scaler(run, elastic, Journal(run, state, lambda: 0.0)), state


def test_what_is_wanted(run: RunDir) -> None:
    assert wanted_replicas(run, {"b": 2}) == {"b": 2}
    Scale(replicas={"b": 3, "c": 4}).write(run.scale)
    assert wanted_replicas(run, {"b": 2}) == {"b": 3}
    Scale(replicas={"b": 3}, balanced={"b": 4, "c": 4}, limits={"c": 2}).write(run.scale)
    assert wanted_replicas(run, {"b": 2, "c": 1}) == {"b": 3, "c": 2}
    for damaged in ('{"replicas": {"b": 0}}', '{"replicas": [1]}', "{", "{}"):
        run.scale.write_text(damaged)
        assert wanted_replicas(run, {"b": 2}) == {"b": 2}


def test_a_change_of_what_is_wanted_is_told_once(run: RunDir) -> None:
    scaler, state = scaler_of(run, {"b": 2})
    assert scaler.look() == state.scale == {"b": 2}
    Scale(replicas={"b": 3}).write(run.scale)
    assert [scaler.look(), scaler.look()] == [{"b": 3}] * 2
    assert RunState.read(run).taken_over().scale == state.scale == {"b": 3}
    (event,) = read_lines(run.events)
    assert (event["event"], event["replicas"]) == ("scale_requested", {"b": 3})


@pytest.mark.parametrize("damaged", ["{", '{"replicas": {"b": 0}}'])
def test_a_wish_that_cannot_be_read_now_is_no_other_wish(run: RunDir, damaged: str) -> None:
    """A file system may be unavailable for a moment: that does not cost a restart of all."""
    scaler, _ = scaler_of(run, {"b": 2})
    Scale(replicas={"b": 3}).write(run.scale)
    assert scaler.look() == {"b": 3}
    run.scale.write_text(damaged)
    assert scaler.look() == {"b": 3}
    assert len(list(read_lines(run.events))) == 1


def test_no_more_are_wanted_than_are_left_until_somebody_asks_for_more(run: RunDir) -> None:
    scaler, _ = scaler_of(run, {"b": 3, "c": 3})
    scaler.limit({"b": 3})
    assert not run.scale.exists(), "as many as are wanted"
    scaler.limit({"b": 2})
    scaler.limit({"c": 1})
    assert wanted_replicas(run, {"b": 3, "c": 3}) == {"b": 2, "c": 1}
    ask_for(run, {"c": 2})
    assert wanted_replicas(run, {"b": 3, "c": 3}) == {"b": 2, "c": 2}
    lift_limits(run)
    assert wanted_replicas(run, {"b": 3, "c": 3}) == {"b": 3, "c": 2}


def written(run: RunDir, **seconds: float) -> None:
    """Let each worker have measured how long a batch takes."""
    for name, one in seconds.items():
        line = {"kind": "train", "batches_per_s": 1 / one, "waiting": {}}
        append_line(run.metrics(name.replace("_", ".")), line)


def test_a_module_with_auto_follows_what_balances_the_chain(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {one: SimpleNamespace(state="running") for one in WORKERS}
    journal: Any = SimpleNamespace(state=SimpleNamespace(modules=modules))
    scaler = Scaler(run, {"b": 1}, journal, ["b"])
    now_s = time.monotonic()

    def wanted(after_s: float = 60) -> int:
        nonlocal now_s
        now_s += after_s
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        scaler._balance()
        return wanted_replicas(run, {"b": 1})["b"]

    assert wanted() == 1, "nothing is measured"
    written(run, a=0.01, b_1=0.029, c=0.005)
    assert wanted(50) == 1, "not yet"
    assert wanted() == 3
    modules["b.2"].state = "starting"
    assert wanted() == 3, "measured while it changes"
    modules["b.2"].state = "running"
    for _ in range(4):
        written(run, b_1=0.019, b_2=0.019, b_3=0.019)
    assert wanted() == 3, "two would do, but only just"
    for _ in range(60):
        written(run, b_1=0.004, b_2=0.004, b_3=0.004)
    assert wanted() == 1
    modules["b.2"].state = modules["b.3"].state = "inactive"
    ask_for(run, {"b": 2})
    assert wanted() == 2, "somebody has asked for it"
    ask_for(run, {"b": 2}, balanced=True)
    assert wanted() == 1
