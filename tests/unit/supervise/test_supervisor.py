"""The supervisor against scripted workers and a clock that only moves when it sleeps."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.files import read_json, write_json
from dni_runtime.plan.plan import LaunchPlan, RestartPlan, WorkerPlan
from dni_runtime.run.cuts import document_file
from dni_runtime.run.documents import state as state_documents
from dni_runtime.run.documents.reports import Control, Order, Report
from dni_runtime.run.documents.state import ModuleState, RunState
from dni_runtime.run.record import Record
from dni_runtime.schedulers.processes import Process
from dni_runtime.spec.named import module_of
from dni_runtime.supervise import journal
from dni_runtime.supervise.pool import STOP_TICK_S, TICK_S
from dni_runtime.supervise.supervisor import Supervisor
from tests.lines import read_lines


class World:
    """Scripted processes; a worker's script maps seconds since the start to what happens."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.now = 0.0
        self.processes: dict[str, FakeProcess] = {}
        self.at: list[tuple[float, Callable[[], None]]] = []
        self.refuse: str | None = None
        self.ended_meanwhile: set[str] = set()
        self.srun_lies = False
        self.saves_at_end = True
        self.gone_elsewhere: set[str] = set()
        self.on_stop: dict[str, Callable[[FakeProcess], None]] = {}
        self.on_start: Callable[[FakeProcess], None] = lambda process: None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds in (TICK_S, STOP_TICK_S)
        self.now += seconds
        assert self.now < 600, "the supervisor does not come to an end"
        for event in [event for event in self.at if event[0] <= self.now]:
            self.at.remove(event)
            event[1]()
        for process in list(self.processes.values()):
            process.look()

    def start(self, worker: WorkerPlan) -> FakeProcess:
        if worker.module == self.refuse:
            raise UnavailableError("no such program")
        process = FakeProcess(self, worker)
        self.processes[worker.module] = process
        self.on_start(process)
        return process

    def adopt(self, worker: WorkerPlan, module: ModuleState) -> FakeProcess:
        process = self.processes[worker.module] = FakeProcess(self, worker)
        process.returncode = -signal.SIGKILL if worker.module in self.ended_meanwhile else None
        return process

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        for process in workers.values():
            process.kill()

    def gone(self, modules: Collection[str]) -> list[str]:
        return [name for name in modules if name in self.gone_elsewhere]

    def exits(self, after_s: float, **codes: int) -> None:
        """Workers that end by themselves; names with their return codes."""
        for name, code in codes.items():
            self.at.append((after_s, lambda name=name, code=code: self.end(name, code)))

    def end(self, name: str, code: int) -> None:
        process = self.processes[name]
        if process.returncode is None:
            process.returncode = code
            if code == 0 and not self.srun_lies:
                document = {"attempt": process.worker.attempt, "state": "finished"}
                write_json(self.record.run.worker(name), document)
            if code == 0 and self.saves_at_end:
                self.save_at_end({"over": True})

    def save_at_end(self, document: dict[str, Any]) -> None:
        """Write the parts, at the end of the stream, of the workers that have finished."""
        run = self.record.run
        there = {name: ModuleState() for name in self.processes} | RunState.read(run).modules
        for name, module in there.items():
            part = run.checkpoint(999, name)
            part.parent.mkdir(exist_ok=True)
            report = Report.read(run.worker(name))
            if module.state != "inactive" and report.state == "finished":
                write_json(document_file(part), document | self.counted(name))

    def counted(self, name: str) -> dict[str, int]:
        """What a worker's part says of how many replicas its module has."""
        process = self.processes.get(name)
        there = {} if process is None else process.worker.replicas
        return {"replicas": there[module_of(name)]} if module_of(name) in there else {}

    def reports(self, after_s: float, state: str) -> None:
        """All workers say that they are in a state."""

        def report() -> None:
            for name, process in self.processes.items():
                document = {"attempt": process.worker.attempt, "state": state}
                write_json(self.record.run.worker(name), document)

        self.at.append((after_s, report))


class FakeProcess:
    def __init__(self, world: World, worker: WorkerPlan) -> None:
        self.world = world
        self.worker = worker
        self.pid = 1000 + len(world.processes)
        self.returncode: int | None = None
        self.told: list[tuple[float, Order]] = []
        self.killed_at: float | None = None

    def poll(self) -> int | None:
        return self.returncode

    def look(self) -> None:
        """Read what is wanted; by default a worker obeys within a second."""
        module = self.worker.module
        wanted = Control.read(self.world.record.run.control(module)).of(self.worker.attempt).order
        if self.returncode is not None or wanted in ("run", *(word for _, word in self.told[-1:])):
            return
        self.told.append((round(self.world.now, 3), wanted))
        obey = self.world.on_stop.get(module)
        if obey is not None:
            obey(self)
        else:
            self.world.exits(self.world.now + 1, **{module: 75})

    def kill(self) -> None:
        self.killed_at = self.world.now
        self.world.end(self.worker.module, -9)


def stubborn(process: FakeProcess) -> None:
    """A worker that does not do what is wanted."""


@pytest.fixture
def world(record: Record) -> World:
    return World(record)


@pytest.fixture
def supervisor(world: World, record: Record, plan: LaunchPlan) -> Supervisor:
    """One that starts nothing again."""
    never = replace(plan, restart=RestartPlan())
    return Supervisor(record.run, never, world, clock=world.clock, sleep=world.sleep)


def events(record: Record) -> list[dict[str, Any]]:
    return list(read_lines(record.run.events))


def states(state: RunState) -> list[str]:
    return [module.state for module in state.modules.values()]


def test_a_run_that_finishes(world: World, supervisor: Supervisor, record: Record) -> None:
    world.reports(2, "running")
    phases: list[str] = []
    world.exits(5, top=0)
    world.exits(6, middle=0, bottom=0)
    state = supervisor.run(lambda state: phases.append(state.phase))
    assert (state.phase, state.exit_code, state.error) == ("finished", 0, None)
    assert states(state) == ["finished"] * 3
    assert list(dict.fromkeys(phases)) == ["starting", "running", "finished"]
    assert [event["event"] for event in events(record)] == [
        "run_started", *["worker_started"] * 3, *["worker_running"] * 3, "run_running",
        *["worker_ended"] * 3, "run_ended",
    ]  # fmt: skip
    assert RunState.read(record.run) == state
    assert not any(process.told for process in world.processes.values())


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.json")


@pytest.mark.parametrize("ends", [{"middle": 73}, {"bottom": 68}, {"middle": 74}, {"top": 70}])
def test_a_full_disk_is_the_reason_that_is_told(
    ends: dict[str, int],
    world: World,
    supervisor: Supervisor,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers may have no room to say so, and their neighbours wait for them in vain."""
    world.reports(2, "running")
    world.exits(5, **ends)
    world.at.append((4, lambda: monkeypatch.setattr(state_documents, "write_json", full)))
    state = supervisor.run()
    (name,) = ends
    assert (state.phase, state.exit_code, state.failed) == ("failed", 74, name)
    assert (state.error or "").endswith(
        "cannot be written: [Errno 28] No space left on device: 'state.json'"
    )
    error = journal.failure(record.run, state)
    assert error is not None
    assert error.exit_code == 74
    assert f"module '{name}' (attempt 1) ended with exit code {ends[name]}" in str(error)
    assert "No space left on device" in str(error).partition("\n")[0]
    # and who reads the run's files afterwards
    state.born = 1
    monkeypatch.undo()
    document = read_json(record.run.state)
    write_json(record.run.state, document | {"born": 1})
    later = RunState.read(record.run)
    assert (later.phase, later.exit_code, later.error) == ("failed", 74, state.error)
    assert str(journal.failure(record.run, later)).partition("\n")[0] == state.error


def test_a_worker_without_room_is_named_by_a_neighbour_that_has_waited(
    world: World, record: Record, plan: LaunchPlan
) -> None:
    """The disk is so full that workers cannot start, and has room for the run's state."""
    once = replace(plan, restart=RestartPlan(policy="on-failure", backoff_s=60, backoff_max_s=60))
    supervisor = Supervisor(record.run, once, world, clock=world.clock, sleep=world.sleep)
    world.reports(2, "running")
    world.exits(5, middle=73)
    world.exits(40, bottom=78)
    world.at.append((39, lambda: record.run.worker("bottom").unlink()))
    state = supervisor.run()
    assert (state.exit_code, state.failed) == (74, "bottom")
    assert "module 'middle' (attempt 1) ended with exit code 73: it could not write" in str(
        state.error
    )


def test_a_worker_that_says_why_it_has_ended_is_believed(
    world: World, supervisor: Supervisor, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.at.append((2, lambda: monkeypatch.setattr(state_documents, "write_json", full)))
    said = {"attempt": 1, "state": "failed", "error": "ValueError: the user's own"}
    world.at.append((5, lambda: write_json(record.run.worker("top"), said)))
    world.exits(5, top=70)
    state = supervisor.run()
    assert (state.exit_code, state.error) == (
        70,
        "module 'top' (attempt 1) ended with exit code 70",
    )


def test_a_log_that_grows_is_emptied_under_its_writer(
    world: World, supervisor: Supervisor, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LOG_BYTES", 1000)
    log = record.run.log("top", 1)
    with log.open("ab", buffering=0) as worker:  # as LocalStarter opens it
        worker.write(b"x" * 1200)
        world.reports(2, "running")
        world.exits(100, top=0, middle=0, bottom=0)
        supervisor.run(lambda state: worker.write(b"later\n") if 90 < world.now < 90.1 else None)
    assert log.with_name(f"{log.name}.1").read_bytes() == b"x" * 1200
    assert set(log.read_bytes().splitlines()) == {b"later"}


def test_the_first_one_may_finish_first(world: World, supervisor: Supervisor) -> None:
    world.exits(1, bottom=0)
    world.exits(200, middle=0)
    world.exits(201, top=0)
    assert supervisor.run().phase == "finished"


def test_a_killed_worker(world: World, supervisor: Supervisor, record: Record) -> None:
    world.exits(3, middle=-9)
    state = supervisor.run()
    assert (state.phase, state.exit_code, state.failed) == ("failed", 70, "middle")
    assert state.error == "module 'middle' (attempt 1) was killed by SIGKILL"
    assert states(state) == ["stopped", "failed", "stopped"]
    middle = state.modules["middle"]
    assert (middle.exit_code, middle.signal) == (137, "SIGKILL")
    assert middle.log == str(record.run.log("middle", 1))
    assert [wanted for _, wanted in world.processes["bottom"].told] == ["stop"]
    assert world.processes["bottom"].killed_at is None


def test_in_a_broken_chain_nobody_waits_long(world: World, supervisor: Supervisor) -> None:
    world.on_stop = {"bottom": stubborn, "top": stubborn}
    world.exits(3, middle=-9)
    state = supervisor.run()
    assert states(state) == ["stopped", "failed", "stopped"]
    ((told_at, _),) = world.processes["top"].told
    killed_at = world.processes["top"].killed_at
    assert killed_at is not None
    assert killed_at - told_at == pytest.approx(5, abs=2 * TICK_S)
    assert world.now < 10


def test_the_cause_comes_before_its_consequences(world: World, supervisor: Supervisor) -> None:
    world.exits(3, bottom=70, top=76, middle=-11)
    state = supervisor.run()
    assert state.failed == "middle"
    assert state.error == "module 'middle' (attempt 1) was killed by SIGSEGV"
    assert states(state) == ["failed"] * 3


@pytest.mark.parametrize(
    ("report", "ending"),
    [
        ({"state": "finished"}, ("finished", 0, "finished")),
        ({"state": "stopped", "exit_code": 75}, ("stopped", 75, "stopped")),
        ({"state": "failed", "exit_code": 79, "error": "x"}, ("failed", 79, "failed")),
        ({"state": "running"}, ("failed", 70, "failed")),
    ],
    ids=["finished", "stopped", "diverged", "unknown"],
)
def test_what_a_worker_has_said_of_its_end_comes_before_a_signal(
    world: World, supervisor: Supervisor, report: dict[str, Any], ending: tuple[str, int, str]
) -> None:
    """Of one whose fork server is dead nobody else knows it."""

    def dies() -> None:
        write_json(world.record.run.worker("middle"), {"attempt": 1, **report})
        world.end("middle", -signal.SIGKILL)

    world.at.append((4.0, dies))
    world.exits(5, bottom=0, top=0)
    state = supervisor.run()
    assert (state.phase, state.exit_code, state.modules["middle"].state) == ending
    assert (state.modules["middle"].signal is None) == (ending[1] != 70)


def test_a_worker_that_gives_up(world: World, supervisor: Supervisor) -> None:
    world.exits(3, top=69)
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("failed", 70)
    assert state.error == "module 'top' (attempt 1) ended with exit code 69"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops(world: World, supervisor: Supervisor, number: int) -> None:
    world.at.append((4.0, lambda: supervisor.interrupt(number)))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert state.error == f"{signal.Signals(number).name} received"
    assert states(state) == ["stopped"] * 3
    assert all(len(process.told) == 1 for process in world.processes.values())


def test_a_second_signal_kills(world: World, supervisor: Supervisor, record: Record) -> None:
    world.on_stop = dict.fromkeys(("bottom", "middle", "top"), stubborn)
    world.at.append((4.0, lambda: supervisor.interrupt(signal.SIGINT)))
    world.at.append((6.0, lambda: supervisor.interrupt(signal.SIGINT)))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 130)
    assert states(state) == ["stopped"] * 3
    assert all(
        process.killed_at == pytest.approx(6, abs=TICK_S) for process in world.processes.values()
    )
    reasons = {event.get("reason") for event in events(record)}
    assert "second SIGINT received" in reasons


def test_a_worker_that_does_not_leave(world: World, supervisor: Supervisor) -> None:
    world.on_stop = {"middle": stubborn}
    world.at.append((4.0, lambda: supervisor.interrupt(signal.SIGTERM)))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert states(state) == ["stopped"] * 3
    killed_at = world.processes["middle"].killed_at
    assert killed_at is not None
    assert killed_at == pytest.approx(4 + 30 + 15, abs=2 * TICK_S)  # stop_grace_s, and to leave


def test_a_request_to_stop(world: World, supervisor: Supervisor, record: Record) -> None:
    def request() -> None:
        write_json(record.run.stop_request, {"time": 0, "timeout_s": 2})

    world.on_stop = {"middle": stubborn}
    world.at.append((4.0, request))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert world.processes["middle"].killed_at == pytest.approx(4 + 2 + 15, abs=2 * TICK_S)


def test_a_second_request_may_have_less_patience(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    def request(timeout_s: float | None) -> None:
        write_json(record.run.stop_request, {"time": 0, "timeout_s": timeout_s})

    world.on_stop = {"middle": stubborn}
    world.at.append((4.0, lambda: request(None)))
    world.at.append((6.0, lambda: request(1)))
    world.at.append((7.0, lambda: request(20)))
    assert supervisor.run().phase == "stopped"
    assert world.processes["middle"].killed_at == pytest.approx(6 + 1 + 15, abs=2 * TICK_S)


def test_what_cannot_be_written_is_written_later(
    world: World,
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = Control.write

    def full(control: Control, path: Path) -> None:
        if 4 <= world.now < 12:
            raise OSError(errno.EIO, "Input/output error")
        write(control, path)

    monkeypatch.setattr(Control, "write", full)
    world.at.append((4.0, lambda: supervisor.interrupt(signal.SIGTERM)))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    for process in world.processes.values():
        ((at, wanted),) = process.told
        assert wanted == "stop"
        assert 12 <= at < 12 + 5 + 2 * TICK_S
        assert process.killed_at is None
    assert "module top cannot be told to stop: [Errno 5] Input/output error" in caplog.text


def test_an_old_request_does_not_count(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    write_json(record.run.stop_request, {"time": 0, "timeout_s": None})
    write_json(record.run.state, {"phase": "stopped"})
    world.exits(5, bottom=0, middle=0, top=0)
    assert supervisor.run().phase == "finished"


def test_a_worker_stopped_by_hand_stops_the_run(world: World, supervisor: Supervisor) -> None:
    world.exits(4, bottom=75)
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert state.error == "module 'bottom' (attempt 1) stopped"


def test_a_failure_while_stopping_is_no_success(world: World, supervisor: Supervisor) -> None:
    def full_disk(process: FakeProcess) -> None:
        process.world.end(process.worker.module, 74)

    world.on_stop = {"middle": full_disk}
    world.at.append((4.0, lambda: supervisor.interrupt(signal.SIGTERM)))
    state = supervisor.run()
    assert (state.phase, state.exit_code, state.failed) == ("failed", 74, "middle")


def saving(world: World, name: str, from_s: float, to_s: float, *, every_s: float = 1) -> None:
    """A worker reports once a second, and every few seconds that more of its state is on disk."""

    def report(at_s: float) -> None:
        process = world.processes[name]
        if process.returncode is None:
            document = {
                "attempt": process.worker.attempt, "state": "running", "time": at_s,
                "doing": "checkpoint", "saving": int(at_s // every_s),
            }  # fmt: skip
            write_json(world.record.run.worker(name), document)

    for at_s in range(int(from_s), int(to_s)):
        world.at.append((at_s, lambda at_s=at_s: report(at_s)))


def test_a_module_may_take_long_for_its_last_checkpoint(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    """It ends long after the tail has: nobody tells it to stop, and the run has finished."""
    world.exits(4, bottom=0, top=0)
    saving(world, "middle", 4, 190, every_s=60)
    world.exits(190, middle=0)
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("finished", 0)
    assert states(state) == ["finished"] * 3
    assert not any(process.told for process in world.processes.values())
    assert not any(event["event"] == "run_stalled" for event in events(record))


@pytest.mark.parametrize(
    ("saves_s", "killed_s"), [(190, None), (0, 49)], ids=["with progress", "without"]
)
def test_who_saves_its_state_may_take_longer_than_the_others_to_stop(
    world: World, supervisor: Supervisor, saves_s: float, killed_s: float | None
) -> None:
    world.on_stop = {"middle": stubborn}
    world.at.append((4.0, lambda: supervisor.interrupt(signal.SIGTERM)))
    saving(world, "middle", 2, saves_s)
    world.exits(193, middle=75)
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    killed_at = world.processes["middle"].killed_at
    assert killed_at == (killed_s and pytest.approx(killed_s, abs=2 * TICK_S))
    assert state.modules["middle"].exit_code == (75 if killed_s is None else 137)


def test_a_checkpoint_that_has_begun_is_written_in_a_broken_chain_too(
    world: World, supervisor: Supervisor
) -> None:
    world.on_stop = {"bottom": stubborn, "top": stubborn}
    saving(world, "top", 2, 30)
    world.exits(4, middle=-9)
    world.exits(30, top=75)
    state = supervisor.run()
    assert state.failed == "middle"
    assert world.processes["top"].killed_at is None
    bottom = world.processes["bottom"].killed_at
    assert bottom is not None
    assert bottom > 30


def test_who_saves_without_progress_is_killed(
    world: World, record: Record, plan: LaunchPlan
) -> None:
    """Its reports come, but nothing more reaches the disk: for ten times stall_s."""
    rules = RestartPlan(stall_s=20)
    supervisor = Supervisor(
        record.run, replace(plan, restart=rules), world, clock=world.clock, sleep=world.sleep
    )
    world.on_stop = {"middle": stubborn}
    world.at.append((4.0, lambda: supervisor.interrupt(signal.SIGTERM)))
    saving(world, "middle", 2, 500, every_s=1000)
    assert supervisor.run().phase == "stopped"
    killed_at = world.processes["middle"].killed_at
    assert killed_at is not None
    assert 200 < killed_at < 225


def test_somebodys_own_limit_holds_for_who_saves_too(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    world.on_stop = {"middle": stubborn}
    request = {"time": 0, "timeout_s": 2}
    world.at.append((4.0, lambda: write_json(record.run.stop_request, request)))
    saving(world, "middle", 2, 300)
    assert supervisor.run().phase == "stopped"
    assert world.processes["middle"].killed_at == pytest.approx(4 + 2 + 15, abs=2 * TICK_S)


@pytest.mark.parametrize("part", [None, {"over": False}, {}])
def test_a_run_whose_last_checkpoint_is_not_complete_has_not_finished(
    world: World, supervisor: Supervisor, part: dict[str, bool] | None
) -> None:
    """All workers say so; but what they have learnt is not there: resume can go on."""
    world.saves_at_end = False
    world.exits(4, bottom=0, middle=0, top=0)
    if part is not None:
        world.at.append((4.0, lambda: world.save_at_end(part)))
    state = supervisor.run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert state.error == "the last checkpoint is not complete"


def test_a_program_that_cannot_be_started(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    world.refuse = "top"
    with pytest.raises(UnavailableError, match="no such program"):
        supervisor.run()
    assert all(process.killed_at is not None for process in world.processes.values())
    state = RunState.read(record.run)
    assert (state.phase, state.exit_code, state.error) == ("failed", 69, "no such program")


def test_what_an_earlier_attempt_left_is_removed(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    write_json(record.run.endpoint("top"), {"address": "ipc:///gone"})
    write_json(record.run.worker("top"), {"attempt": 1, "state": "running"})
    there: list[bool] = []
    world.on_start = lambda process: there.append(record.run.worker("top").exists())
    world.exits(1, bottom=0, middle=0, top=0)
    supervisor.run()
    assert not record.run.endpoint("top").exists()
    assert there == [False] * 3


def test_sockets_are_removed(world: World, supervisor: Supervisor, plan: LaunchPlan) -> None:
    folder = Path(plan.sockets)
    folder.mkdir(mode=0o700)
    os.mknod(folder / "top.sock", stat.S_IFSOCK | 0o600)
    world.exits(1, bottom=0, middle=0, top=0)
    supervisor.run()
    assert not folder.exists()


def test_what_killed_workers_left_half_written_goes_at_the_end(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    folder = record.run.checkpoint(10, "top").parent
    folder.mkdir()
    left = [
        folder / ".top.safetensors.n1.0123abcd",
        record.run.snapshot("top").parent / ".top.json.x",
    ]
    world.at.append((0.5, lambda: [path.touch() for path in left] and None))
    there: list[bool] = []
    world.at.append((1.5, lambda: there.append(all(path.exists() for path in left))))
    world.exits(1, top=-9)
    world.exits(2, bottom=0, middle=0)
    supervisor.run()
    assert there == [True]
    assert not any(path.exists() for path in left)


def test_a_report_that_cannot_be_read_does_not_end_the_run(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    world.at.append((1.0, lambda: record.run.worker("top").mkdir()))
    world.reports(3.0, "running")
    world.at.append((2.5, lambda: record.run.worker("top").rmdir()))
    world.exits(5, bottom=0, middle=0, top=0)
    assert supervisor.run().phase == "finished"
    assert "run_running" in [event["event"] for event in events(record)]


def test_a_report_of_another_attempt_does_not_count(
    world: World, supervisor: Supervisor, record: Record
) -> None:
    def report() -> None:
        for name in world.processes:
            write_json(record.run.worker(name), {"attempt": 7, "state": "running"})

    phases: set[str] = set()
    world.at.append((1.0, report))
    world.exits(5, bottom=0, middle=0, top=0)
    supervisor.run(lambda state: phases.add(state.phase))
    assert phases == {"starting", "finished"}


def left(record: Record, world: World, **modules: ModuleState) -> RunState:
    """The state of a run whose supervisor was killed; its workers go on unless they have ended."""
    state = RunState.begin("process", 1, ["bottom", "middle", "top"])
    state.modules |= modules
    for name in state.modules:
        path = record.run.worker(name)
        write_json(path, {"attempt": 1, "state": "running"})
    state.pid, state.host, state.phase = 1, "another", "running"
    return state


def adopting(record: Record, plan: LaunchPlan, world: World, state: RunState) -> Supervisor:
    return Supervisor(record.run, plan, world, adopt=state, clock=world.clock, sleep=world.sleep)


def test_workers_that_go_on_are_adopted(world: World, record: Record, plan: LaunchPlan) -> None:
    state = left(record, world)
    supervisor = adopting(record, plan, world, state)
    world.exits(3, top=0)
    world.exits(4, bottom=0, middle=0)
    ended = supervisor.run()
    assert (ended.phase, ended.attempt, ended.pid) == ("finished", 1, os.getpid())
    assert [event["event"] for event in events(record)] == [
        "run_adopted", *["worker_running"] * 3, "run_running", *["worker_ended"] * 3, "run_ended",
    ]  # fmt: skip
    assert events(record)[0]["modules"] == ["bottom", "middle", "top"]


@pytest.mark.parametrize(
    ("report", "phase"),
    [
        ({"state": "finished"}, "finished"),
        ({"state": "stopped", "exit_code": 75}, "stopped"),
        ({"state": "failed", "exit_code": 78}, "failed"),
    ],
)
def test_one_that_ended_meanwhile_has_said_how(
    world: World, record: Record, plan: LaunchPlan, report: dict[str, Any], phase: str
) -> None:
    state = left(record, world)
    write_json(record.run.worker("top"), {"attempt": 1, **report})
    world.ended_meanwhile.add("top")
    world.exits(3, bottom=0, middle=0)
    assert adopting(record, plan, world, state).run().phase == phase


def test_one_that_died_meanwhile_is_started_again(
    world: World, record: Record, plan: LaunchPlan
) -> None:
    again = plan.workers[1].restarted(4)
    kept = replace(plan, workers=(plan.workers[0], again, plan.workers[2]))
    state = left(record, world, middle=ModuleState(state="running", attempt=4, restarts=3))
    write_json(record.run.worker("middle"), {"attempt": 4, "state": "running"})
    world.ended_meanwhile.add("middle")
    world.exits(3, top=0)
    world.exits(4, bottom=0, middle=0)
    rules = replace(kept, restart=RestartPlan(policy="on-failure"))
    ended = adopting(record, rules, world, state).run()
    middle = ended.modules["middle"]
    assert (ended.phase, middle.attempt, middle.restarts) == ("finished", 5, 4)
    assert world.processes["middle"].worker.resume == "auto"
    kept = LaunchPlan.from_json(read_json(record.run.plan) or {})  # for the supervisor after it
    assert [worker.attempt for worker in kept.workers] == [1, 5, 1]


def test_who_takes_over_restarts_all_where_the_former_supervisor_was_about_to(
    world: World, record: Record, plan: LaunchPlan
) -> None:
    state = left(record, world)
    state.restart_reason = "other numbers of replicas are wanted"
    world.exits(6, bottom=0, middle=0, top=0)
    ended = adopting(record, plan, world, state).run()
    assert (ended.phase, ended.restart_reason) == ("finished", None)
    assert {module.attempt for module in ended.modules.values()} == {2}
    (reason,) = {one["reason"] for one in events(record) if one["event"] == "worker_restarting"}
    assert reason == "other numbers of replicas are wanted"
    assert all(process.worker.resume == "0" for process in world.processes.values())


def test_where_all_are_to_restart_nobody_is_started_before(
    world: World, record: Record, plan: LaunchPlan
) -> None:
    state = left(record, world)
    state.restart_reason = "other numbers of replicas are wanted"
    world.ended_meanwhile.add("bottom")
    world.exits(9, bottom=0, middle=0, top=0)
    rules = replace(plan, restart=RestartPlan(policy="on-failure", backoff_s=0))
    assert adopting(record, rules, world, state).run().phase == "finished"
    started = [one["module"] for one in events(record) if one["event"] == "worker_started"]
    assert started == ["bottom", "middle", "top"]


def test_one_that_has_finished_before_is_left_alone(
    world: World, record: Record, plan: LaunchPlan
) -> None:
    state = left(record, world, top=ModuleState(state="finished", attempt=1, exit_code=0))
    write_json(record.run.worker("top"), {"attempt": 1, "state": "finished"})
    world.exits(3, bottom=0, middle=0)
    assert adopting(record, plan, world, state).run().phase == "finished"
    assert "top" not in world.processes
