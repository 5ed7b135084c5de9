"""What is to be done until as many replicas take batches as are wanted."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dni_runtime.documents.requests import Replicas, Scale
from dni_runtime.documents.state import RunState
from dni_runtime.files import append_line
from dni_runtime.launch.scaling import (
    Scaler,
    Steps,
    ask_for,
    next_steps,
    replicas_now,
    still_missed,
    wanted_replicas,
    without,
)
from dni_runtime.rundir import RunDir
from dni_runtime.worker.ledger import Counts, Ledger, Progress

WORKERS = ["a", "b.1", "b.2", "b.3", "c"]


def steps(wanted: int, active: tuple[int, ...], *phases: str) -> Steps:
    all_phases = dict(zip(WORKERS, ["running", *phases, "running"], strict=True))
    return next_steps({"b": wanted}, {"b": active}, WORKERS, all_phases)


@pytest.mark.parametrize(
    ("wanted", "active", "phases", "after", "start", "end"),
    [
        pytest.param(1, (1,), "rpp", (1,), (), (), id="nothing to do"),
        pytest.param(3, (1,), "rpp", (1,), ("b.2", "b.3"), (), id="workers start"),
        pytest.param(3, (1,), "rsj", (1, 3), (), (), id="one is ready, another one not yet"),
        pytest.param(2, (1,), "rjj", (1, 2), (), ("b.3",), id="one is not needed any more"),
        pytest.param(1, (1, 2, 3), "rrr", (1,), (), (), id="the highest leave"),
        pytest.param(1, (1, 2), "rjp", (1, 2), (), (), id="its marker may be on its way"),
        pytest.param(2, (1,), "rrp", (1,), (), (), id="it has not left yet: no other one for it"),
        pytest.param(2, (1, 3), "rpr", (1, 3), (), (), id="any two are two"),
        pytest.param(3, (1, 3), "rpr", (1, 3), ("b.2",), (), id="the lowest comes first"),
        pytest.param(1, (1, 2), "ssp", (1, 2), (), (), id="all are still starting"),
    ],
)
def test_the_next_steps(
    wanted: int,
    active: tuple[int, ...],
    phases: str,
    after: tuple[int, ...],
    start: tuple[str, ...],
    end: tuple[str, ...],
) -> None:
    words = {"r": "running", "p": "parked", "j": "joining", "s": "starting"}
    found = steps(wanted, active, *(words[one] for one in phases))
    assert found == Steps({"b": after}, start, end)


def test_what_is_wanted_and_what_takes_batches(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    assert wanted_replicas(run, {"b": 2}) == {"b": 2}
    first, now = Replicas(active={"b": (1, 2)}), Replicas(active={"b": (1, 3)}, lost={"b.2": 4})
    assert replicas_now(run, {"b": 2}) == first
    Scale(replicas={"b": 3, "c": 4}).write(run.scale)
    now.write(run.replicas)
    assert wanted_replicas(run, {"b": 2}) == {"b": 3}
    assert replicas_now(run, {"b": 2}) == now
    for damaged in ('{"replicas": {"b": 0}}', '{"active": {"b": [0]}}', '{"active": [1]}', "{}"):
        run.scale.write_text(damaged)
        run.replicas.write_text(damaged)
        assert wanted_replicas(run, {"b": 2}) == {"b": 2}
        assert replicas_now(run, {"b": 2}) == first


def test_what_the_others_can_do_without() -> None:
    active = {"b": (1, 3), "c": (1,)}
    assert without(active, "b.3") == {**active, "b": (1,)}
    assert without(active, "b.2") == active, "it takes none"
    assert without(active, "b.1") is None, "the others share by the first one"
    assert without(active, "c.1") is None
    assert without(active, "a.2") is None, "its number cannot change"


def test_a_lost_replica_is_missed_until_all_have_passed_its_last_marker(tmp_path: Path) -> None:
    run, lost = RunDir(tmp_path), {"b.2": 8}
    run.create()

    def write(cut: int, *names: str) -> None:
        for name in names:
            part = run.checkpoint(cut, name)
            part.parent.mkdir(exist_ok=True)
            (part.parent / name).touch()

    write(8, "a.json", "b.1.json", "b.2.parked")  # of a time before it had joined
    write(12, "a.json", "b.1.json", "b.2.json")
    write(16, "a.json", "b.2.parked")
    assert still_missed(run, lost, ["a", "b.1", "b.2"]) == lost
    write(16, "b.1.json")
    assert still_missed(run, lost, ["a", "b.1", "b.2"]) == {}


@pytest.mark.parametrize("active", [(1, 3), (1,)], ids=["takes batches", "leaves"])
def test_nobody_waits_for_a_replica_that_is_lost(tmp_path: Path, active: tuple[int, ...]) -> None:
    """Also if it was to leave, and has not passed its last marker."""
    run = RunDir(tmp_path)
    run.create()
    Replicas(active={"b": active}).write(run.replicas)
    parked = list[str]()
    never = SimpleNamespace(resume="join", first=1)
    pool: Any = SimpleNamespace(park=parked.append, workers={"a": None, "b.3": never})
    journal: Any = SimpleNamespace(
        event=lambda *what, **more: None, state=SimpleNamespace(anew=None)
    )
    assert Scaler(run, {"b": 2}, pool, journal).lose("b.3", "its node is lost")
    assert replicas_now(run, {"b": 2}) == Replicas(active={"b": (1,)}, lost={"b.3": 0})
    assert parked == ["b.3"]


@pytest.mark.parametrize(
    ("active", "counts", "anew"),
    [
        pytest.param((1, 2), None, True, id="takes batches"),
        pytest.param((1,), Counts(id=8), True, id="leaves"),
        pytest.param((1,), Counts(waits=True), False, id="joins"),
    ],
)
def test_a_lost_replica_of_the_head_had_batches_in_its_hands(
    tmp_path: Path, active: tuple[int, ...], counts: Counts | None, anew: bool
) -> None:
    """So all begin again; but one that is still to join has none."""
    run = RunDir(tmp_path)
    run.create()
    if counts is not None:
        Ledger(run.ledger("a.2"), Progress(counts)).close()
    Replicas(active={"a": active}).write(run.replicas)
    second = SimpleNamespace(resume="join", first=1)
    pool: Any = SimpleNamespace(park=lambda name: None, workers={"a.1": None, "a.2": second})
    state = RunState()
    journal: Any = SimpleNamespace(
        event=lambda *what, **more: None, state=state, write=lambda: state.write(run)
    )
    scaler = Scaler(run, {"a": 1}, pool, journal)
    assert scaler.lose("a.2", "it cannot start")
    after = Counts.read(run.ledger("a.2"))
    assert (after is not None and after.has_left) == (counts is not None and not counts.waits)
    assert replicas_now(run, {"a": 1}).active == {"a": (1,)}
    assert (state.anew is not None) == anew
    assert RunState.read(run).taken_over().anew == state.anew, "the next supervisor knows"
    assert not scaler.lose("a.1", "it cannot start")


def scaler_of(run: RunDir, phases: dict[str, str], parked: list[str]) -> Scaler:
    """A scaler of a module ``b`` with three replicas, after the head ``a``."""
    modules = {name: SimpleNamespace(state=phase) for name, phase in phases.items()}
    pool: Any = SimpleNamespace(
        park=parked.append, parking=set(), join=parked.count, workers=modules
    )
    journal: Any = SimpleNamespace(
        event=lambda *what, **more: None,
        write=lambda: None,
        state=SimpleNamespace(modules=modules, wanted={"b": 3}),
    )
    Scale(replicas={"b": 3}).write(run.scale)
    return Scaler(run, {"b": 1}, pool, journal)


def test_who_is_to_join_when_the_stream_is_over_is_ended(tmp_path: Path) -> None:
    """Even if its marker has been asked for: the head will not send it any more."""
    run, parked = RunDir(tmp_path), list[str]()
    run.create()
    Replicas(active={"b": (1, 2)}).write(run.replicas)
    phases = {"a": "running", "b.1": "running", "b.2": "joining", "b.3": "joining"}
    scaler_of(run, phases, parked).look()
    assert parked == []
    scaler_of(run, phases | {"a": "finished"}, parked).look()
    assert parked == ["b.2", "b.3"]


@pytest.mark.parametrize("leaving", [True, False])
def test_who_leaves_may_wait_for_a_lost_one_after_all_others(
    tmp_path: Path, leaving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.create()
    monkeypatch.setattr("dni_runtime.launch.scaling.still_missed", lambda *given: {})
    Replicas(active={"b": (1,)}, lost={"b.3": 8}).write(run.replicas)
    phases = {"a": "running", "b.1": "running", "b.3": "parked"}
    scaler_of(run, phases | {"b.2": "running" if leaving else "starting"}, []).look()
    assert replicas_now(run, {}).lost == ({"b.3": 8} if leaving else {})


def written(run: RunDir, **seconds: float) -> None:
    """Let each worker have measured how long a batch takes."""
    for name, one in seconds.items():
        line = {"kind": "train", "batches_per_s": 1 / one, "waiting": {}}
        append_line(run.metrics(name.replace("_", ".")), line)


def test_a_module_with_auto_follows_what_balances_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.create()
    modules = {one: SimpleNamespace(state="running") for one in WORKERS}
    pool: Any = None
    journal: Any = SimpleNamespace(state=SimpleNamespace(modules=modules))
    scaler = Scaler(run, {"b": 1}, pool, journal, ["b"])
    now_s = time.monotonic()

    def wanted(after_s: float = 20) -> int:
        nonlocal now_s
        now_s += after_s
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        scaler._balance()
        return wanted_replicas(run, {"b": 1})["b"]

    assert wanted() == 1, "nothing is measured"
    written(run, a=0.01, b_1=0.029, c=0.005)
    assert wanted(1) == 1, "not yet"
    assert wanted() == 3
    modules["b.2"].state = "joining"
    assert wanted() == 3, "measured while it changes"
    modules["b.2"].state = "running"
    for _ in range(4):
        written(run, b_1=0.019, b_2=0.019, b_3=0.019)
    assert wanted() == 3, "two would do, but only just"
    for _ in range(60):
        written(run, b_1=0.004, b_2=0.004, b_3=0.004)
    assert wanted() == 1
    ask_for(run, {"b": 2})
    assert wanted() == 2, "somebody has asked for it"
    ask_for(run, {"b": 2}, balanced=True)
    assert wanted() == 1
