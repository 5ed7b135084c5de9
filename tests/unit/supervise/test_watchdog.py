"""The supervisor and what its workers' reports say of a run in which nothing goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dni_runtime.files import write_json
from dni_runtime.plan.plan import LaunchPlan, RestartPlan
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.supervise.journal import Journal
from dni_runtime.supervise.stall import Watchdog
from dni_runtime.supervise.supervisor import Supervisor
from tests.unit.supervise.test_supervisor import World, events

STALL_S = 20.0
Doing = Callable[[float], dict[str, str]]


class Watched(World):
    """Workers that report once a second; they train, but for those that do something else.

    ``doing`` is what the newest start of a module does that does not train; ``ids`` are positions
    in the stream; ``phases`` has the run's phases and errors, one after the other.
    """

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.doing: dict[tuple[str, int], str] = {}
        self.ids = {"bottom": 0, "middle": 0, "top": 0}
        self.phases: list[tuple[str, str | None]] = []

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if round(self.now, 1) % 1:
            return
        stopped = any((n, p.worker.attempt) in self.doing for n, p in self.processes.items())
        for name, process in self.processes.items():
            if process.returncode is not None:
                continue
            attempt = process.worker.attempt
            doing = self.doing.get((name, attempt), "window" if name != "top" else "input")
            if not stopped:
                self.ids[name] += 1
            document: dict[str, Any] = {"attempt": attempt, "state": "running", "begun": True,
                        "id": self.ids[name], "doing": doing, "time": self.now}  # fmt: skip
            write_json(self.record.run.worker(name), document)

    def observe(self, state: RunState) -> None:
        if not self.phases or self.phases[-1][0] != state.phase:
            self.phases.append((state.phase, state.error))


@pytest.fixture
def world(record: Record) -> Watched:
    return Watched(record)


@pytest.fixture
def supervise(world: Watched, record: Record, plan: LaunchPlan) -> Callable[..., RunState]:
    def run(**changes: Any) -> RunState:
        rules = RestartPlan(policy="on-failure", limit=2, healthy_s=10, stall_s=STALL_S)
        chosen = replace(plan, restart=rules.model_copy(update=changes))
        supervisor = Supervisor(record.run, chosen, world, clock=world.clock, sleep=world.sleep)
        return supervisor.run(world.observe)

    return run


def happened(record: Record, *names: str) -> list[dict[str, Any]]:
    return [event for event in events(record) if event["event"] in names]


def hang(world: Watched, at_s: float, name: str, attempt: int, doing: str = "batch") -> None:
    world.at.append((at_s, lambda: world.doing.__setitem__((name, attempt), doing)))


def test_a_stall_is_told_and_is_over_when_it_moves(
    world: Watched, record: Record, supervise: Callable[..., RunState]
) -> None:
    hang(world, 30, "top", 1)
    world.at.append((70, world.doing.clear))
    world.exits(90, bottom=0, middle=0, top=0)
    state = supervise()
    assert (state.phase, state.error) == ("finished", None)
    phases = [phase for phase, _ in world.phases]
    assert phases == ["starting", "running", "stalled", "running", "finished"]
    assert "'top' has been busy with one batch" in str(world.phases[2][1])
    assert [error for phase, error in world.phases if phase != "stalled"] == [None] * 4
    told, over = happened(record, "run_stalled", "run_progressing")
    assert (told["event"], told["module"]) == ("run_stalled", "top")
    assert "one batch" in told["reason"]
    assert (over["event"], over["module"]) == ("run_progressing", "top")
    assert 15 < over["after_s"] < 25
    assert not happened(record, "worker_killed", "worker_restarting")


def test_what_has_stalled_is_restarted(
    world: Watched, record: Record, supervise: Callable[..., RunState]
) -> None:
    hang(world, 30, "middle", 1)
    world.exits(90, bottom=0, middle=0, top=0)
    assert supervise(on_stall="restart").phase == "finished"
    assert [event["event"] for event in happened(
        record, "run_stalled", "worker_killed", "worker_restarting", "run_progressing"
    )] == ["run_stalled", "worker_killed", "worker_restarting", "run_progressing"]  # fmt: skip
    (killed,) = happened(record, "worker_killed")
    assert (killed["module"], killed["reason"].split(",")[0]) == ("middle", "on_stall: restart")
    assert world.processes["middle"].worker.attempt == 2


def test_restarts_of_what_stalls_again_are_limited(
    world: Watched, record: Record, supervise: Callable[..., RunState]
) -> None:
    """Time in which nothing moved is not the healthy stretch that starts the count anew."""
    for attempt in (1, 2, 3):
        hang(world, 5, "top", attempt)
    state = supervise(on_stall="restart")
    assert (state.phase, state.failed) == ("failed", "top")
    assert len(happened(record, "run_stalled")) == 3
    assert state.modules["top"].restarts == 2
    assert not happened(record, "run_progressing")


def test_of_a_link_the_ends_take_turns(
    world: Watched, record: Record, supervise: Callable[..., RunState]
) -> None:
    """Whatever one end has lost, the other may be the one that does not send it."""
    hang(world, 5, "bottom", 1, doing="window")
    for attempt in (1, 2):
        hang(world, 5, "middle", attempt, doing="input")
    world.at.append((60, lambda: world.doing.pop(("middle", 2), None)))
    world.exits(120, bottom=0, middle=0, top=0)
    assert supervise(on_stall="restart").phase == "finished"
    assert [one["module"] for one in happened(record, "worker_killed")] == ["middle", "bottom"]
    assert len(happened(record, "run_progressing")) == 1


def test_the_stall_of_a_worker_that_is_left_out_is_over(record: Record, plan: LaunchPlan) -> None:
    state = RunState.begin("process", 1, ["bottom", "middle", "top"])
    state.phase = "running"
    rules = replace(plan, restart=RestartPlan(stall_s=STALL_S))
    watchdog = Watchdog(rules, Journal(record.run, state, lambda: 0.0))

    def look(s: int, *names: str) -> str:
        doing = {"bottom": "window", "middle": "window", "top": "batch"}
        ids = {"bottom": 1, "middle": 1, "top": 1} if "top" in names else {"bottom": s, "middle": s}
        watchdog.look(float(s), {
            name: Report(attempt=1, state="running", id=ids[name], doing=doing[name], time=s)
            for name in names
        })  # fmt: skip
        return state.phase

    phases = [look(s, "bottom", "middle", "top") for s in range(300)]
    assert (phases[-1], state.error is not None) == ("stalled", True)
    state.modules["top"].state = "inactive"
    assert (look(300, "bottom", "middle"), state.error) == ("running", None)
    told, over = happened(record, "run_stalled", "run_progressing")
    assert told["module"] == over["module"] == "top"


def test_a_run_that_stops_or_cannot_be_written_has_not_stalled(
    world: Watched, record: Record, supervise: Callable[..., RunState],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The reports of workers whose disk is full do not change."""
    hang(world, 5, "top", 1)
    monkeypatch.setattr(RunState, "save", _no_room)
    world.exits(90, bottom=0, middle=0, top=0)
    assert supervise().phase == "finished"
    assert not happened(record, "run_stalled")


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_journal_knows_whether_the_disk_is_full(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(record.run, RunState.begin("process", 1, ["a"]), lambda: 0.0)
    journal.write()
    assert not journal.trouble
    with monkeypatch.context() as patch:
        patch.setattr(RunState, "save", _no_room)
        journal.write()
        assert journal.trouble
    journal.write()
    assert not journal.trouble
