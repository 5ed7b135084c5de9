"""Other numbers of replicas: all workers stop at a cut and start there, by scripted workers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from dni_runtime.files import write_json
from dni_runtime.plan.plan import LaunchPlan, RestartPlan
from dni_runtime.run.cuts import document_file
from dni_runtime.run.documents.reports import WorkerPhase
from dni_runtime.run.documents.requests import Scale
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.supervise.scaling import wanted_replicas
from dni_runtime.supervise.supervisor import Supervisor
from tests.unit.plan.test_restarts import RULES, attempts, begun
from tests.unit.supervise.test_supervisor import FakeProcess, World, events, states, stubborn

NAMES = ("bottom", "middle.1", "middle.2", "middle.3", "top")
CUT = 100
REASON = "other numbers of replicas are wanted"
Make = Callable[..., Supervisor]


class Scaled(World):
    """Workers that run at once, and write their part of a cut when they are told to stop.

    ``alone`` are those that were started while one of another start was still there.
    """

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.alone: list[str] = []
        self.on_start = self.begins
        self.on_stop = dict.fromkeys(NAMES, self.stops)

    def begins(self, process: FakeProcess) -> None:
        name, attempt = process.worker.module, process.worker.attempt
        others = self.processes.values()
        if any(one.returncode is None and one.worker.attempt != attempt for one in others):
            self.alone.append(name)
        begun(self, name)

    def stops(self, process: FakeProcess) -> None:
        self.write_part(process.worker.module, CUT)
        self.exits(self.now + 1, **{process.worker.module: 75})

    def write_part(self, name: str, cut: int) -> None:
        part = self.record.run.checkpoint(cut, name)
        part.parent.mkdir(parents=True, exist_ok=True)
        write_json(document_file(part), {"bytes": 0, **self.counted(name)})
        part.with_name(f"{name}.safetensors").touch()

    def wish(self, at_s: float, count: int) -> None:
        """Somebody asks for so many."""
        scale = Scale(replicas={"middle": count})
        self.at.append((at_s, lambda: scale.write(self.record.run.scale)))

    def finish(self, at_s: float) -> None:
        """All that are there by then come to the end of the stream."""

        def done() -> None:
            for name, process in list(self.processes.items()):
                if process.returncode is None:
                    self.end(name, 0)

        self.at.append((at_s, done))


@pytest.fixture
def world(record: Record) -> Scaled:
    return Scaled(record)


@pytest.fixture
def plan(plan: LaunchPlan) -> LaunchPlan:
    """One of a chain whose middle may have one to three replicas."""
    workers = tuple(replace(plan.workers[0], module=name) for name in NAMES)
    return replace(plan, workers=workers, restart=RULES)


@pytest.fixture
def make(world: Scaled, record: Record, plan: LaunchPlan) -> Make:
    """A supervisor of a run that begins with so many replicas."""

    def supervisor(
        start: int, *, adopt: RunState | None = None, rules: RestartPlan = RULES
    ) -> Supervisor:
        chosen = replace(plan, elastic={"middle": start}, restart=rules)
        return Supervisor(
            record.run, chosen, world, adopt=adopt, clock=world.clock, sleep=world.sleep
        )

    return supervisor


def replicas(record: Record, kind: str = "scaled") -> list[int]:
    return [event["replicas"]["middle"] for event in events(record) if event["event"] == kind]


def there(count: int) -> list[str]:
    return [name for name in NAMES if name not in (f"middle.{one}" for one in (1, 2, 3)[count:])]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (1, 2), (3, 2), (3, 1)])
def test_all_stop_at_a_cut_and_start_there_with_the_new_number(
    world: Scaled, make: Make, record: Record, before: int, after: int
) -> None:
    firsts = dict[str, FakeProcess]()
    world.at.append((3.8, lambda: firsts.update(world.processes)))
    world.at.append((3.8, lambda: world.write_part("middle.3", 200)))
    world.wish(4, after)
    world.finish(30)
    phases: set[str] = set()
    state = make(before).run(lambda state: phases.add(state.phase))
    assert (state.phase, state.exit_code, state.error) == ("finished", 0, None)
    assert phases == {"starting", "running", "finished"}
    assert replicas(record, "scale_requested") == replicas(record) == [after]
    assert list(firsts) == there(before)
    assert [wanted for one in firsts.values() for _, wanted in one.told] == ["stop"] * len(firsts)
    assert all(process.killed_at is None for process in firsts.values())
    assert world.alone == []
    for name in NAMES:
        expected = [1] * (name in there(before)) + [2] * (name in there(after))
        assert attempts(record, name) == expected
        assert state.modules[name].state == ("finished" if name in there(after) else "inactive")
    for name in there(after):
        worker = world.processes[name].worker
        assert (worker.resume, worker.first) == (str(CUT), 2)
        assert worker.replicas == {"middle": after}
    kept = LaunchPlan.read(record.run).workers
    assert {one.replicas["middle"] for one in kept} == {after}
    assert [one.attempt for one in kept if one.module in there(after)] == [2] * len(there(after))
    assert document_file(record.run.checkpoint(CUT, "middle.3")).exists() == (before == 3)
    # a worker forgets by itself what it had written later; one that does not start cannot
    assert document_file(record.run.checkpoint(200, "middle.3")).exists() == (after == 3)
    reasons = {one["reason"] for one in events(record) if one["event"] == "worker_restarting"}
    assert reasons == {REASON}


def test_the_number_changes_again_and_back(world: Scaled, make: Make, record: Record) -> None:
    for at_s, count in ((4, 3), (14, 1), (24, 2)):
        world.wish(at_s, count)
    world.finish(40)
    state = make(2).run()
    assert (state.phase, replicas(record)) == ("finished", [3, 1, 2])
    assert attempts(record, "middle.2") == [1, 2, 4]
    assert attempts(record, "middle.3") == [2]
    assert attempts(record, "bottom") == [1, 2, 3, 4]


def test_as_many_as_there_are_cost_no_restart(world: Scaled, make: Make, record: Record) -> None:
    world.wish(4, 2)
    world.finish(20)
    assert make(2).run().phase == "finished"
    assert not any(process.told for process in world.processes.values())
    assert not replicas(record)


def test_a_wish_waits_until_all_workers_run(world: Scaled, make: Make, record: Record) -> None:
    """Some of them may have nothing yet that they could write."""
    world.on_start = lambda process: world.begins(process) if process.worker.first == 2 else None
    firsts = dict[str, FakeProcess]()
    world.at.append((1, lambda: firsts.update(world.processes)))
    world.at.append((6, lambda: begun(world, "bottom", "middle.1", "top")))
    world.wish(2, 3)
    world.at.append((10, lambda: begun(world, "middle.2")))
    world.finish(30)
    assert make(2).run().phase == "finished"
    assert replicas(record) == [3]
    assert [10 <= at_s < 12 for one in firsts.values() for at_s, _ in one.told] == [True] * 4


def test_a_wish_waits_for_a_worker_that_is_restarted(
    world: Scaled, make: Make, record: Record
) -> None:
    world.exits(3, **{"middle.1": -9})
    world.wish(4, 3)
    world.finish(40)
    told = list[float]()

    def stops(process: FakeProcess) -> None:
        told.append(world.now)
        world.stops(process)

    world.on_stop["top"] = stops
    assert make(2, rules=RULES.model_copy(update={"backoff_s": 10})).run().phase == "finished"
    assert attempts(record, "middle.1") == [1, 2, 3]
    assert [at_s >= 13 for at_s in told] == [True]


def test_the_newest_wish_counts(world: Scaled, make: Make, record: Record) -> None:
    """Also one that comes while the workers stop for another one."""
    world.wish(4, 3)
    world.wish(4.4, 1)
    world.finish(30)
    assert make(2).run().phase == "finished"
    assert replicas(record) == [1]


def test_a_wish_that_is_withdrawn_while_all_stop_starts_them_as_before(
    world: Scaled, make: Make, record: Record
) -> None:
    world.wish(4, 3)
    world.wish(4.4, 2)
    world.finish(30)
    state = make(2).run()
    assert (state.phase, replicas(record)) == ("finished", [])
    assert attempts(record, "bottom") == [1, 2]
    assert state.modules["middle.3"].state == "inactive"


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
@pytest.mark.parametrize("at_s", [5.4, 9.0], ids=["while some stop", "with the last one"])
def test_whoever_stops_the_run_meanwhile_has_the_last_word(
    world: Scaled, make: Make, record: Record, number: int | None, at_s: float
) -> None:
    supervisor = make(1)

    def stop() -> None:
        if number is not None:
            supervisor.interrupt(number)
        else:
            write_json(record.run.stop_request, {"time": 0, "timeout_s": None})

    world.on_stop["top"] = stubborn
    world.wish(4, 3)
    world.at.append((at_s, stop))
    world.exits(9, top=75)
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert state.error == ("SIGTERM received" if number else "'dnictl stop' was called")
    assert {one.state for one in state.modules.values()} == {"stopped", "inactive"}
    assert attempts(record, "bottom") == [1]
    assert not replicas(record)
    record.run.stop_request.unlink(missing_ok=True)
    world.finish(30)
    assert make(1).run().phase == "finished", "resumed"
    assert there(3) == [name for name in NAMES if name in world.processes]
    assert world.processes["top"].worker.replicas == {"middle": 3}


def test_a_second_signal_kills_those_that_stop_for_other_numbers(
    world: Scaled, make: Make, record: Record
) -> None:
    supervisor = make(1)
    world.on_stop["top"] = stubborn
    world.wish(4, 3)
    for at_s in (7, 8):
        world.at.append((at_s, lambda: supervisor.interrupt(signal.SIGINT)))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 130)
    assert attempts(record, "top") == [1]


@pytest.mark.parametrize("name", ["bottom", "middle.2", "top"])
def test_one_that_fails_meanwhile_does_not_keep_the_others(
    world: Scaled, make: Make, record: Record, name: str
) -> None:
    """The cut is not complete: all start at the one before, with the new number."""
    for one in there(2):
        world.at.append((3, lambda one=one: world.write_part(one, 50)))  # type: ignore[misc]
    world.on_stop = dict.fromkeys(NAMES, stubborn)
    world.on_stop[name] = lambda process: world.end(process.worker.module, 70)
    firsts = dict[str, FakeProcess]()
    world.at.append((3, lambda: firsts.update(world.processes)))
    world.wish(4, 3)
    world.finish(80)
    state = make(2).run()
    assert (state.phase, state.failed, replicas(record)) == ("finished", None, [3])
    for other in set(there(2)) - {name}:
        ((told_at, _),) = firsts[other].told
        assert firsts[other].killed_at == pytest.approx(told_at + 5, abs=1.5)
    assert {process.worker.resume for process in world.processes.values()} == {"50"}
    assert {one.attempt for one in state.modules.values()} == {2}
    assert [one.restarts for one in state.modules.values()] == [1] * 5


def test_one_that_hangs_meanwhile_is_killed_after_its_time(
    world: Scaled, make: Make, record: Record
) -> None:
    """Who is started then has a time of its own."""
    world.on_stop["middle.1"] = stubborn
    firsts = dict[str, FakeProcess]()
    world.at.append((3, lambda: firsts.update(world.processes)))
    world.wish(4, 1)
    world.finish(150)
    state = make(2).run()
    assert (state.phase, replicas(record)) == ("finished", [1])
    ((told_at, _),) = firsts["middle.1"].told
    assert firsts["middle.1"].killed_at == pytest.approx(told_at + 30 + 15, abs=1)
    assert state.modules["middle.2"].state == "inactive"
    killed = [one["module"] for one in events(record) if one["event"] == "worker_killed"]
    assert killed == ["middle.1"]
    assert attempts(record, "middle.1") == [1, 2]


def test_the_stream_may_be_over_before_they_can_stop(
    world: Scaled, make: Make, record: Record
) -> None:
    world.on_stop = dict.fromkeys(NAMES, stubborn)
    world.wish(4, 3)
    world.finish(8)
    state = make(2).run()
    assert (state.phase, state.exit_code, state.restart_reason) == ("finished", 0, None)
    assert not replicas(record)
    assert attempts(record, "top") == [1]


def test_a_request_to_restart_one_of_them_has_come_true_by_then(
    world: Scaled, make: Make, record: Record
) -> None:
    """It is not told to leave the others: they could not get to the cut without it."""
    told = list[str]()
    world.on_stop["top"] = stubborn
    world.wish(4, 3)
    world.at.append((7, lambda: write_json(record.run.restart_request("top"), {"time": 0})))

    def leave() -> None:
        told.extend(wanted for _, wanted in world.processes["top"].told)
        world.stops(world.processes["top"])

    world.at.append((11, leave))
    world.finish(40)
    assert make(2).run().phase == "finished"
    assert told == ["stop"]
    assert not record.run.restart_request("top").exists()
    assert attempts(record, "top") == [1, 2]
    assert {process.worker.resume for process in world.processes.values()} == {str(CUT)}


def stopping(record: Record, world: Scaled) -> RunState:
    """The state of a run whose supervisor was killed after it had told all to stop."""
    state = RunState.begin("process", 1, NAMES)
    state.pid, state.host, state.phase = 1, "another", "running"
    state.scale, state.restart_reason = {"middle": 3}, REASON
    state.modules["middle.3"].state = "inactive"
    for name in there(2):
        state.modules[name].state = "running"
        write_json(record.run.worker(name), {"attempt": 1, "state": "running"})
    Scale(replicas={"middle": 3}).write(record.run.scale)
    return state


def kept_plan(record: Record, plan: LaunchPlan) -> LaunchPlan:
    """The plan as a supervisor keeps it that has started two replicas."""
    workers = tuple(replace(worker, replicas={"middle": 2}) for worker in plan.workers)
    kept = replace(plan, elastic={"middle": 2}, workers=workers)
    write_json(record.run.plan, kept.to_json())
    return kept


@pytest.mark.parametrize("ended", [(), ("bottom", "top"), tuple(there(2))])
def test_who_takes_over_meanwhile_goes_on_with_the_change(
    world: Scaled, record: Record, plan: LaunchPlan, ended: tuple[str, ...]
) -> None:
    state = stopping(record, world)
    world.ended_meanwhile.update(ended)
    kept = kept_plan(record, plan)
    for name in ended:
        report = {"attempt": 1, "state": "stopped", "exit_code": 75}
        write_json(record.run.worker(name), report)
        part = record.run.checkpoint(CUT, name)
        part.parent.mkdir(parents=True, exist_ok=True)
        document_file(part).write_text('{"replicas": 2, "bytes": 0}')
        part.with_name(f"{name}.safetensors").touch()
    world.finish(30)
    supervisor = Supervisor(
        record.run, kept, world, adopt=state, clock=world.clock, sleep=world.sleep
    )
    after = supervisor.run()
    assert (after.phase, after.restart_reason, after.scale) == ("finished", None, {"middle": 3})
    assert replicas(record) == [3]
    assert [event["event"] for event in events(record)].count("run_adopted") == 1
    assert all(attempts(record, name) == [2] for name in NAMES)
    assert {process.worker.resume for process in world.processes.values()} == {str(CUT)}
    assert world.alone == []


@pytest.mark.parametrize("written", ["inactive", "running"])
def test_who_takes_over_after_the_change_leaves_out_who_is_inactive(
    world: Scaled, record: Record, plan: LaunchPlan, written: WorkerPhase
) -> None:
    """Also if the former supervisor was killed when it had written the plan, but not the state."""
    changes = {"restart_reason": None, "scale": {"middle": 2}}
    state = stopping(record, world).model_copy(update=changes)
    state.modules["middle.3"].state = written
    record.run.scale.unlink()
    world.finish(20)
    supervisor = Supervisor(
        record.run,
        kept_plan(record, plan),
        world,
        adopt=state,
        clock=world.clock,
        sleep=world.sleep,
    )
    after = supervisor.run()
    assert states(after) == ["finished", "finished", "finished", "inactive", "finished"]
    assert "middle.3" not in world.processes
    assert not replicas(record)


def test_a_run_begins_with_what_was_wanted_before(
    world: Scaled, make: Make, record: Record
) -> None:
    Scale(replicas={"middle": 3}, limits={"middle": 2}).write(record.run.scale)
    world.finish(20)
    assert make(1).run().phase == "finished"
    assert attempts(record, "middle.3") == [1]
    assert not replicas(record), "that is no change"
    assert wanted_replicas(record.run, {"middle": 1}) == {"middle": 3}


def test_what_balances_the_chain_is_done_in_the_same_way(
    world: Scaled, record: Record, plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``replicas: auto``."""
    monkeypatch.setattr("time.monotonic", world.clock)
    monkeypatch.setattr(
        "dni_runtime.supervise.scaling.balance_of", lambda *given, **more: {"middle": 3}
    )
    chosen = replace(plan, elastic={"middle": 1}, auto=("middle",))
    world.finish(90)
    state = Supervisor(record.run, chosen, world, clock=world.clock, sleep=world.sleep).run()
    assert (state.phase, replicas(record)) == ("finished", [3])
    assert Scale.load(record.run.scale) == Scale(balanced={"middle": 3})
    assert attempts(record, "bottom") == [1, 2]
