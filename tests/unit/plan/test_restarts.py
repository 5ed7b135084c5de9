"""Starting workers again: the rules, and the supervisor against scripted workers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from dni_runtime.errors import DamagedError
from dni_runtime.files import write_json
from dni_runtime.plan.plan import Backoff, LaunchPlan, RestartPlan
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.supervise.journal import failure
from dni_runtime.supervise.supervisor import Supervisor
from tests.unit.supervise.test_supervisor import FakeProcess, World, events, states, stubborn

RULES = RestartPlan(policy="on-failure", limit=3, backoff_s=0.5, backoff_max_s=30, healthy_s=60)
MakeSupervisor = Callable[..., Supervisor]


@pytest.fixture
def world(record: Record) -> World:
    return World(record)


@pytest.fixture
def supervise(world: World, record: Record, plan: LaunchPlan) -> MakeSupervisor:
    def make(**changes: object) -> Supervisor:
        chosen = replace(plan, restart=RULES.model_copy(update=changes))  # type: ignore[arg-type]
        return Supervisor(record.run, chosen, world, clock=world.clock, sleep=world.sleep)

    return make


def begun(world: World, *names: str) -> None:
    """These workers have taken their place in the stream."""
    for name in names:
        attempt = world.processes[name].worker.attempt
        report = {"attempt": attempt, "state": "running"}
        write_json(world.record.run.worker(name), report)


def finish(world: World, at_s: float) -> None:
    world.exits(at_s, top=0)
    world.exits(at_s + 1, middle=0, bottom=0)


def attempts(record: Record, name: str, kind: str = "worker_started") -> list[int]:
    return [
        event["attempt"]
        for event in events(record)
        if event["event"] == kind and event["module"] == name
    ]


def test_delays_double_up_to_a_limit() -> None:
    patience, plan = Backoff(), RULES.model_copy(update={"limit": 9, "backoff_max_s": 5})
    delays = [patience.delay_s(plan, 137, 0) for _ in range(10)]
    assert delays == [0.5, 1, 2, 4, 5, 5, 5, 5, 5, None]


def test_a_healthy_stretch_starts_the_count_anew() -> None:
    patience = Backoff()
    assert [patience.delay_s(RULES, 137, 0) for _ in range(3)] == [0.5, 1, 2]
    patience.running_since_s = 10
    assert patience.delay_s(RULES, 137, 69) is None
    patience.running_since_s = 10
    assert patience.delay_s(RULES, 137, 70) == 0.5


def test_what_was_there_may_come_back() -> None:
    """An interface, a driver, a neighbour: tried again by a module that has run, with a limit."""
    plan = RULES.model_copy(update={"limit": 3})
    for code in (68, 69):
        patience = Backoff()
        assert patience.runs(1, 1)
        assert [patience.delay_s(plan, code, 2) for _ in range(4)] == [0.5, 1, 2, None]
        assert Backoff().delay_s(plan, code, 2) is None


@pytest.mark.parametrize("code", [64, 65, 66, 68, 69, 72, 74, 76, 78, 79, 127])
def test_some_failures_no_start_can_mend(code: int) -> None:
    assert Backoff().delay_s(RULES, code, 0) is None


@pytest.mark.parametrize("code", [1, 70, 134, 137, 143])
def test_others_it_can(code: int) -> None:
    assert Backoff().delay_s(RULES, code, 0) == 0.5
    assert Backoff().delay_s(RULES.model_copy(update={"policy": "never"}), code, 0) is None


def test_a_killed_worker_is_started_again(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.exits(4, middle=-9)
    finish(world, 20)
    state = supervise().run()
    assert (state.phase, state.exit_code) == ("finished", 0)
    middle = state.modules["middle"]
    assert (middle.restarts, middle.attempt, middle.state) == (1, 2, "finished")
    assert (middle.exit_code, middle.signal) == (0, None)
    assert state.modules["bottom"].restarts == 0
    worker = world.processes["middle"].worker
    assert (worker.resume, worker.first, worker.attempt) == ("0", 1, 2)
    assert worker.log == str(record.run.log("middle", 2))
    assert attempts(record, "middle") == [1, 2]
    assert attempts(record, "top") == [1]
    (again,) = [event for event in events(record) if event["event"] == "worker_restarting"]
    assert (again["module"], again["attempt"], again["delay_s"]) == ("middle", 2, 0.5)
    assert "killed by SIGKILL" in again["reason"]
    assert not world.processes["bottom"].told


def test_a_restart_waits_until_the_plan_is_written(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """A supervisor that takes over would start the attempt before it again, beside this one."""

    def full() -> None:
        record.run.plan.unlink()
        record.run.plan.mkdir()

    started = dict[int, float]()
    world.on_start = lambda one: (
        started.update({one.worker.attempt: world.now}) if one.worker.module == "middle" else None
    )
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.at.append((3, full))
    world.exits(4, middle=-9)
    world.at.append((12, record.run.plan.rmdir))
    finish(world, 20)
    state = supervise().run()
    assert (state.phase, list(started)) == ("finished", [1, 2])
    assert 12 <= started[2] < 13
    kept = {worker.module: worker.attempt for worker in LaunchPlan.read(record.run).workers}
    assert kept == {"bottom": 1, "middle": 2, "top": 1}


def test_a_module_that_diverges_ends_the_run(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    words = "module 'middle' has diverged: the loss is not finite at batch 7"
    diverged = {"batch": 7, "what": "the loss", "times": 1}
    report = {"attempt": 1, "state": "failed", "error": f"{words}\n  → what to do"}
    path = record.run.worker("middle")
    world.at.append((4, lambda: write_json(path, report | {"diverged": diverged})))
    world.exits(4, middle=79)
    state = supervise().run()
    assert (state.phase, state.exit_code, state.failed) == ("failed", 79, "middle")
    assert state.error == words
    (event,) = [event for event in events(record) if event["event"] == "worker_diverged"]
    assert (event["module"], event["batch"], event["what"]) == ("middle", 7, "the loss")
    assert attempts(record, "middle") == [1]


@pytest.mark.parametrize("said", [False, True])
def test_one_that_cannot_even_say_that_it_starts_is_not_started_again(
    world: World, supervise: MakeSupervisor, record: Record, said: bool
) -> None:
    if said:
        world.reports(0.5, "starting")
    world.exits(1, middle=1)
    finish(world, 20)
    assert supervise().run().phase == ("finished" if said else "failed")
    assert attempts(record, "middle") == ([1, 2] if said else [1])


def test_it_waits_longer_each_time_and_then_gives_up(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    def dies(process: FakeProcess) -> None:
        if process.worker.module == "middle":
            world.exits(world.now + 1, middle=-9)

    world.on_start = dies
    state = supervise().run()
    assert (state.phase, state.exit_code, state.failed) == ("failed", 70, "middle")
    assert state.error == "module 'middle' (attempt 4) was killed by SIGKILL"
    assert states(state) == ["stopped", "failed", "stopped"]
    delays = [e["delay_s"] for e in events(record) if e["event"] == "worker_restarting"]
    assert delays == [0.5, 1, 2]


def test_one_that_cannot_be_started_is_tried_again(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """A full disk, on which there is no room for a log file."""
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.exits(4, middle=-9)
    world.at.append((4, lambda: setattr(world, "refuse", "middle")))
    world.at.append((7, lambda: setattr(world, "refuse", None)))
    finish(world, 20)
    state = supervise().run()
    assert (state.phase, state.failed) == ("finished", None)
    assert attempts(record, "middle") == [1, 4]
    again = [event for event in events(record) if event["event"] == "worker_restarting"]
    assert [event["delay_s"] for event in again] == [0.5, 1, 2]
    assert again[1]["reason"] == again[2]["reason"] == "no such program"
    assert world.processes["middle"].worker.resume == "0"


def test_one_that_can_never_be_started_ends_the_run(
    world: World, supervise: MakeSupervisor
) -> None:
    world.exits(4, middle=-9)
    world.at.append((4, lambda: setattr(world, "refuse", "middle")))
    state = supervise().run()
    assert (state.phase, state.failed, state.error) == ("failed", "middle", "no such program")
    assert states(state) == ["stopped", "failed", "stopped"]


def test_bad_input_ends_the_run_at_once(world: World, supervise: MakeSupervisor) -> None:
    world.exits(1, bottom=66)
    state = supervise().run()
    assert (state.phase, state.failed, state.modules["bottom"].restarts) == ("failed", "bottom", 0)


def test_an_exact_chain_is_started_again_as_a_whole(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.exits(4, middle=-9, top=70)
    finish(world, 20)
    state = supervise(scope="chain").run()
    assert state.phase == "finished"
    for name in ("bottom", "middle", "top"):
        assert attempts(record, name) == [1, 2]
        assert world.processes[name].worker.resume == "0"


def test_who_cannot_even_be_killed_is_not_waited_for_for_ever(
    world: World,
    supervise: MakeSupervisor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It waits for a disk or a driver (state D); meanwhile the others know that the owner lives."""
    written: list[float] = []
    save = RunState.save

    def note(state: RunState, run: RunDir) -> None:
        written.append(world.now)
        save(state, run)

    def stay(process: FakeProcess) -> None:
        if process.worker.attempt > 1 or process.worker.module != "top":
            world.end(process.worker.module, -9)

    monkeypatch.setattr(RunState, "save", note)
    monkeypatch.setattr(FakeProcess, "kill", stay)
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.exits(4, middle=-9)
    finish(world, 40)
    state = supervise(scope="chain").run()
    assert state.phase == "finished"
    assert "killed, but still there: top" in caplog.text
    waited = [at for at in written if 4.5 < at < 19]
    assert waited
    assert state.modules["top"].attempt == 2


def test_all_have_one_attempt_after_a_start_of_the_whole_chain(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """By its number the replicas of a head know what belongs to this start."""
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.exits(3, middle=-9)
    world.at.append((5, lambda: begun(world, "middle")))
    report = {"attempt": 1, "state": "failed", "error": "top's part is damaged"}
    world.at.append((6, lambda: write_json(record.run.worker("top"), report)))
    write_cuts(record.run, 10, 20)
    world.exits(7, top=DamagedError.exit_code)
    finish(world, 20)
    state = supervise().run()
    assert state.phase == "finished"
    assert attempts(record, "middle") == [1, 2, 3]
    assert attempts(record, "bottom") == attempts(record, "top") == [1, 3]


def write_cuts(run: RunDir, *cuts: int) -> None:
    for cut in cuts:
        for name in ("bottom", "middle", "top"):
            part = run.checkpoint(cut, name)
            part.parent.mkdir(parents=True, exist_ok=True)
            part.with_suffix(".json").write_text('{"bytes": 3}')
            part.with_suffix(".safetensors").write_text("abc")


def test_all_begin_at_the_cut_that_the_supervisor_has_found(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """Also one that dies before it has begun, though there is a newer cut by then."""
    write_cuts(record.run, 100, 200)
    (record.run.checkpoint(200, "top").with_suffix(".safetensors")).write_text("a")
    begun_at: list[str] = []
    world.on_start = lambda process: begun_at.append(process.worker.resume)
    world.at.append((2, lambda: begun(world, "bottom", "top")))
    world.at.append((3, lambda: write_cuts(record.run, 200, 300)))
    report = {"attempt": 1, "state": "starting"}
    world.at.append((3, lambda: write_json(record.run.worker("middle"), report)))
    world.exits(4, middle=-9)
    finish(world, 20)
    assert supervise().run().phase == "finished"
    assert begun_at == ["100"] * 4
    (damaged,) = [event for event in events(record) if event["event"] == "checkpoint_damaged"]
    assert "module 'top'" in damaged["reason"]
    assert "checkpoint 200" in damaged["reason"]


def test_an_exact_chain_goes_back_to_one_cut(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.at.append((3, lambda: write_cuts(record.run, 100)))
    world.exits(4, middle=-9)
    finish(world, 20)
    assert supervise(scope="chain").run().phase == "finished"
    assert {process.worker.resume for process in world.processes.values()} == {"100"}


@pytest.mark.parametrize("policy", ["on-failure", "never"])
def test_a_damaged_part_sends_all_to_the_cut_before(
    world: World, supervise: MakeSupervisor, record: Record, policy: str
) -> None:
    """Which a worker finds that reads it; the others may have begun at that cut already."""
    write_cuts(record.run, 100, 200)

    def finds_damage() -> None:
        begun(world, "bottom", "top")
        report = {"attempt": 1, "state": "failed", "error": "middle's part is damaged"}
        write_json(record.run.worker("middle"), report)
        world.end("middle", 72)

    world.at.append((2, finds_damage))
    finish(world, 20)
    assert supervise(policy=policy).run().phase == "finished"
    for name in ("bottom", "middle", "top"):
        assert attempts(record, name) == [1, 2]
        assert world.processes[name].worker.resume == "100"
    (damaged,) = [event for event in events(record) if event["event"] == "checkpoint_damaged"]
    assert damaged["reason"] == "middle's part is damaged"


def test_one_that_cannot_read_its_own_states_sends_all_to_the_newest_cut(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """Those need not be of the cut at which the chain began: later ones may be intact."""
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.at.append((3, lambda: write_cuts(record.run, 100, 200)))
    world.exits(4, middle=-9)

    def cannot_read() -> None:
        report = {"attempt": 2, "state": "failed", "error": "an error of the disk"}
        write_json(record.run.worker("middle"), report)
        world.end("middle", 72)

    world.at.append((8, cannot_read))
    finish(world, 20)
    assert supervise().run().phase == "finished"
    assert attempts(record, "middle") == [1, 2, 3]
    assert attempts(record, "top") == attempts(record, "bottom") == [1, 3]
    assert {process.worker.resume for process in world.processes.values()} == {"200"}
    (damaged,) = [event for event in events(record) if event["event"] == "checkpoint_damaged"]
    assert damaged["reason"] == "an error of the disk"


def test_a_run_without_a_whole_checkpoint_fails(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """It does not begin from scratch without being told to."""
    write_cuts(record.run, 100)
    world.exits(2, middle=72)
    with pytest.raises(DamagedError, match="checkpoint at 100 is damaged, and no older"):
        supervise().run()
    state = RunState.read(record.run)
    assert (state.phase, state.exit_code) == ("failed", 72)
    assert all(process.poll() is not None for process in world.processes.values())


def test_a_checkpoint_that_was_asked_for_is_not_exchanged(
    world: World, record: Record, plan: LaunchPlan
) -> None:
    write_cuts(record.run, 100, 200)
    chosen = tuple(worker.restarted(1, resume="200") for worker in plan.workers)
    asked = replace(plan, workers=chosen, restart=RULES)
    world.exits(2, middle=72)
    state = Supervisor(record.run, asked, world, clock=world.clock, sleep=world.sleep).run()
    assert (state.phase, state.failed) == ("failed", "middle")
    assert attempts(record, "middle") == [1]


def test_stopping_while_a_module_is_away(world: World, supervise: MakeSupervisor) -> None:
    supervisor = supervise(backoff_s=20)
    world.exits(3, middle=-9)
    world.at.append((5.0, lambda: supervisor.interrupt(signal.SIGTERM)))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert states(state) == ["stopped"] * 3
    assert world.processes["middle"].worker.attempt == 1


def test_a_module_that_somebody_wants_to_be_started_again(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    half_written = record.run.requests / ".restart-top.host.1234"

    def request() -> None:
        begun(world, "bottom", "middle", "top")
        half_written.touch()
        write_json(record.run.restart_request("bottom"), {"time": 0})

    world.at.append((4.0, request))
    world.at.append((12.0, lambda: begun(world, "bottom")))
    finish(world, 20)
    state = supervise(policy="never").run()
    assert state.phase == "finished"
    assert attempts(record, "bottom") == attempts(record, "bottom", "worker_running") == [1, 2]
    assert world.processes["bottom"].worker.resume == "0"
    assert not record.run.restart_request("bottom").exists()
    assert half_written.exists()


def test_a_module_that_does_not_leave_for_its_restart(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    world.on_stop = {"middle": stubborn}
    world.at.append((4.0, lambda: write_json(record.run.restart_request("middle"), {})))
    finish(world, 80)
    state = supervise().run()
    assert state.phase == "finished"
    assert attempts(record, "middle") == [1, 2]
    (killed,) = [event for event in events(record) if event["event"] == "worker_killed"]
    assert killed["reason"] == "it did not exit in time"
    assert killed["module"] == "middle"


@pytest.mark.parametrize(
    ("position", "restarted"), [(100, ["middle"]), (101, ["bottom", "middle", "top"])]
)
def test_of_an_exact_chain_one_module_restarts_alone_only_where_it_has_saved(
    world: World,
    supervise: MakeSupervisor,
    record: Record,
    position: int,
    restarted: list[str],
) -> None:
    """Without a marker in time it leaves as well, but what it had after that is lost with it."""

    def leave(process: FakeProcess) -> None:
        write_cuts(record.run, 100)
        report = {"attempt": 1, "state": "stopped", "id": position}
        write_json(record.run.worker("middle"), report)
        world.end("middle", 75)

    world.on_stop = {"middle": leave}
    world.at.append((4.0, lambda: write_json(record.run.restart_request("middle"), {})))
    finish(world, 20)
    assert supervise(scope="chain").run().phase == "finished"
    for name in ("bottom", "middle", "top"):
        assert attempts(record, name) == ([1, 2] if name in restarted else [1])
    assert world.processes["middle"].worker.resume == ("0" if len(restarted) == 1 else "100")


def test_of_an_exact_chain_all_modules_restart_with_one_that_does_not_leave(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    write_cuts(record.run, 100)
    world.on_stop = {"middle": stubborn}
    world.at.append((1.0, lambda: write_cuts(record.run, 200)))
    world.at.append((4.0, lambda: write_json(record.run.restart_request("middle"), {})))
    finish(world, 80)
    assert supervise(scope="chain").run().phase == "finished"
    for name in ("bottom", "middle", "top"):
        assert attempts(record, name) == [1, 2]
        assert world.processes[name].worker.resume == "200"


def test_a_wish_is_forgotten_when_the_whole_chain_is_started_again(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    world.on_stop = {"middle": stubborn}
    world.at.append((4.0, lambda: write_json(record.run.restart_request("middle"), {})))
    world.exits(6, bottom=-9)
    finish(world, 80)
    assert supervise(scope="chain").run().phase == "finished"
    assert attempts(record, "middle") == [1, 2]
    assert not [event for event in events(record) if event["event"] == "worker_killed"]


def test_a_warning_becomes_an_event(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    def warn(warning: str | None) -> None:
        report = {"attempt": 1, "state": "running", "warning": warning}
        write_json(record.run.worker("top"), report)

    for at_s, warning in ((2, "no room"), (4, "no room"), (6, None), (8, "no room")):
        world.at.append((at_s, lambda warning=warning: warn(warning)))  # type: ignore[misc]
    finish(world, 12)
    supervise().run()
    warnings = [event for event in events(record) if event["event"] == "worker_warning"]
    assert [(event["module"], event["warning"]) for event in warnings] == [("top", "no room")] * 2


def test_logs_of_many_starts_are_not_kept(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    record.run.create()

    def start(process: FakeProcess) -> None:
        name, attempt = process.worker.module, process.worker.attempt
        log = record.run.log(name, attempt)
        log.touch()
        log.with_name(f"{log.name}.1").touch()  # what it held before it was emptied
        begun(world, name)
        if name == "middle":
            world.exits(world.now + 1, middle=-9 if attempt < 40 else 0)

    world.on_start = start
    world.exits(500, top=0, bottom=0)
    supervise(limit=1000, backoff_s=0, backoff_max_s=0).run()
    kept = [number for number in range(1, 41) if record.run.log("middle", number).exists()]
    assert kept == [1, *range(21, 41)]
    assert len([*record.run.log("middle", 1).parent.glob("middle.*.log.1")]) == len(kept)


def test_an_exit_code_of_0_is_not_believed(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """An srun whose step could not be launched ends with 0, too."""
    world.srun_lies = True
    world.exits(4, top=0)
    world.at.append((6.0, lambda: setattr(world, "srun_lies", False)))
    finish(world, 20)
    state = supervise().run()
    assert (state.phase, attempts(record, "top")) == ("finished", [1, 2])
    (again,) = [one for one in events(record) if one["event"] == "worker_restarting"]
    assert again["reason"].endswith("ended with exit code 0 before it had finished")


def test_one_whose_step_has_gone_is_not_waited_for(
    world: World, supervise: MakeSupervisor, record: Record
) -> None:
    """An srun that was cut off when its step ended may never hear of that."""
    world.reports(2.0, "running")
    world.at.append((4.0, lambda: world.gone_elsewhere.add("middle")))
    world.at.append((60.0, lambda: world.gone_elsewhere.clear()))
    finish(world, 120)
    assert supervise().run().phase == "finished"
    assert attempts(record, "middle") == [1, 2]
    (killed,) = [event for event in events(record) if event["event"] == "worker_killed"]
    assert killed["reason"] == "its step has ended, but its srun has not"


def test_what_ends_a_worker_twice_at_one_position_will_do_so_again() -> None:
    backoff = Backoff()
    deaths = [("index 7", 3), ("index 7", 4), (None, 4), ("index 7", 4), ("other", 4), ("other", 4)]
    assert [backoff.repeats(*one) for one in deaths] == [False] * 5 + [True]


@pytest.mark.parametrize(("positions", "started"), [((5, 5, 5), 2), ((5, 6, 7), 4)])
def test_a_worker_that_dies_of_its_input_is_not_restarted_for_ever(
    world: World,
    supervise: MakeSupervisor,
    record: Record,
    positions: tuple[int, ...],
    started: int,
) -> None:
    supervisor = supervise()

    def dies(position: int) -> None:
        if "middle" in world.processes:
            attempt = world.processes["middle"].worker.attempt
            report = {"attempt": attempt, "state": "failed", "id": position, "error": "index 7"}
            write_json(record.run.worker("middle"), report)
            world.end("middle", 70)

    for number, position in enumerate(positions):
        world.at.append((5.0 + 5 * number, lambda position=position: dies(position)))
    finish(world, 40)
    state = supervisor.run()
    assert attempts(record, "middle") == list(range(1, started + 1))
    assert state.phase == ("failed" if started == 2 else "finished")
    if started == 2:
        error = failure(record.run, state)
        assert "as before: the same error at the same position" in str(error)
        assert "dnictl resume" not in str(error)


def test_an_error_of_the_supervisor_keeps_its_code(record: Record) -> None:
    """No module is to blame: all checkpoints are damaged, say."""
    state = RunState(phase="failed", exit_code=72, error="all are damaged", modules={})
    error = failure(record.run, state)
    assert error is not None
    assert (error.exit_code, error.message) == (72, "all are damaged")


@pytest.mark.parametrize(("code", "hint"), [(66, "correct the data"), (79, "'dnictl up --carry")])
def test_what_would_do_the_same_again_is_not_advised(
    world: World, supervise: MakeSupervisor, record: Record, code: int, hint: str
) -> None:
    supervisor = supervise()
    world.exits(5.0, middle=code)
    state = supervisor.run()
    error = failure(record.run, state)
    assert error is not None
    assert (state.exit_code, error.exit_code) == (code, code)
    assert hint in str(error.hint)
    assert "dnictl resume" not in str(error)
