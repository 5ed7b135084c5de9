"""State of a run, and whether its supervisor still lives."""

from __future__ import annotations

import os
import socket
import time

import pytest

from dni_runtime.errors import DataError
from dni_runtime.files import read_json, write_json
from dni_runtime.run.documents.state import RunState, machine, process_birth, shell_status
from dni_runtime.run.rundir import RunDir
from tests.unit.runs import write_over


def test_a_run_without_state_is_new(run: RunDir) -> None:
    state = RunState.read(run)
    assert (state.phase, state.attempt, state.active) == ("new", 0, False)


def test_round_trip(run: RunDir) -> None:
    state = RunState.begin("process", 2, ["a", "b"])
    state.save(run)
    assert RunState.read(run) == state
    assert state.active
    assert (state.pid, state.host) == (os.getpid(), socket.gethostname())
    assert [module.attempt for module in state.modules.values()] == [2, 2]


def test_process_ids_are_those_of_a_namespace() -> None:
    """Containers of one host may have its name, and process ids of their own."""
    assert os.readlink("/proc/self/ns/pid") == f"pid:[{machine().split()[1]}]"


def without_supervisor(run: RunDir, *reports: str) -> RunState:
    """The state of a run whose supervisor is dead, and whose workers have said this."""
    names = [f"m{number}" for number in range(len(reports))]
    state = RunState.begin("process", 1, names)
    state.phase, state.born = "running", 1
    for name, report in zip(names, reports, strict=True):
        write_json(run.worker(name), {"attempt": 1, "state": report, "time": 0})
        if report == "running":  # it lives: this very process
            module = state.modules[name]
            module.pid, module.born = os.getpid(), process_birth(os.getpid())
    state.save(run)
    return RunState.read(run)


def test_workers_that_go_on_without_a_supervisor(run: RunDir) -> None:
    state = without_supervisor(run, "running", "finished", "connecting")
    assert (state.phase, state.active) == ("unsupervised", True)
    assert [one.state for one in state.modules.values()] == ["running", "finished", "failed"]


@pytest.mark.parametrize(
    ("reports", "phase", "code"),
    [
        (("finished", "finished"), "finished", 0),
        (("stopped", "finished"), "stopped", 75),
        (("failed", "finished"), "lost", None),
        (("connecting", "stopped"), "lost", None),
    ],
)
def test_workers_that_have_ended_without_a_supervisor(
    run: RunDir, reports: tuple[str, ...], phase: str, code: int | None
) -> None:
    for name in ("m0", "m1"):
        write_over(run, name)
    state = without_supervisor(run, *reports)
    assert (state.phase, state.exit_code, state.active) == (phase, code, False)


def test_workers_that_have_finished_without_their_last_checkpoint(run: RunDir) -> None:
    """A part may show late, where another host has written it; later it is lost."""
    write_over(run, "m0")
    state = without_supervisor(run, "finished", "finished")
    assert (state.phase, state.exit_code) == ("unsupervised", None)
    for name in ("m0", "m1"):
        os.utime(run.worker(name), (1, 1))
    state = RunState.read(run)
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert state.error == "the last checkpoint is not complete"
    write_over(run, "m1")
    assert RunState.read(run).phase == "finished"


def test_a_worker_that_nobody_has_recorded(run: RunDir) -> None:
    """Its supervisor was killed between its start and that of the record."""
    state = RunState.begin("process", 1, ["a", "b"])
    state.phase, state.born = "running", 1
    for module in state.modules.values():
        module.state, module.pid, module.born = "restarting", 1, 1
    state.save(run)
    write_json(
        run.plan, {"workers": [{"module": "a", "attempt": 2}, {"module": "b", "attempt": 2}]}
    )
    assert RunState.read(run).phase == "lost"
    born = process_birth(os.getpid())
    report = {"attempt": 2, "state": "running", "pid": os.getpid(), "born": born}
    write_json(run.worker("a"), report | {"host": "elsewhere"})
    assert RunState.read(run).phase == "lost"
    write_json(run.worker("a"), report | {"host": socket.gethostname()})
    found = RunState.read(run)
    assert (found.phase, found.last_attempt) == ("unsupervised", 2)
    assert (found.modules["a"].pid, found.modules["a"].born) == (os.getpid(), born)
    assert [one.state for one in found.modules.values()] == ["running", "failed"]


def test_a_host_of_the_same_name(run: RunDir) -> None:
    """Its processes are not to be looked for here: its own words count."""
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.machine, state.born = "running", "another boot", 1
    state.save(run)
    assert RunState.read(run).phase == "running"
    document = read_json(run.state)
    assert document is not None
    write_json(run.state, document | {"updated": time.time() - 500})
    os.utime(run.state, (1, 1))
    assert RunState.read(run).phase == "lost"
    report = {"attempt": 1, "state": "running", "time": time.time()}
    write_json(run.worker("a"), report)
    assert RunState.read(run).phase == "unsupervised"


def test_a_process_id_in_new_hands_is_noticed(run: RunDir) -> None:
    state = RunState.begin("process", 1, ["a"])
    assert state.born is not None
    state.born -= 1
    state.save(run)
    assert RunState.read(run).phase == "lost"


def test_an_ended_run_is_never_lost(run: RunDir) -> None:
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.pid, state.born = "finished", 1 << 22, 7
    state.save(run)
    assert RunState.read(run).phase == "finished"


@pytest.mark.parametrize("ahead_s", [-200, 0, 200])
@pytest.mark.parametrize(("silence_s", "phase"), [(5, "running"), (500, "lost")])
def test_on_another_host_its_word_counts(
    run: RunDir, silence_s: float, phase: str, ahead_s: float
) -> None:
    """By the file system's clock, where that of the other host differs."""
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.host, state.born = "running", "elsewhere", 1
    state.save(run)
    document = read_json(run.state)
    assert document is not None
    written = time.time() - silence_s
    write_json(run.state, document | {"updated": written + ahead_s})
    os.utime(run.state, (written, written))
    assert RunState.read(run).phase == phase
    assert not [name for name in os.listdir(run.root) if name.startswith(".")]


def test_workers_of_another_host_whose_clock_differs(run: RunDir) -> None:
    state = RunState.begin("process", 1, ["a"])
    state.phase, state.host, state.born = "running", "elsewhere", 1
    state.save(run)
    document = read_json(run.state)
    assert document is not None
    write_json(run.state, document | {"updated": 0})
    os.utime(run.state, (0, 0))
    write_json(run.worker("a"), {"attempt": 1, "state": "running", "time": time.time() - 200})
    assert RunState.read(run).phase == "unsupervised"


def test_fields_of_a_later_version_are_passed_over(run: RunDir) -> None:
    RunState.begin("process", 1, ["a"]).save(run)
    document = read_json(run.state)
    assert document is not None
    document["modules"]["a"]["node"] = "n1"
    write_json(run.state, document | {"queue": "long"})
    assert RunState.read(run).modules["a"].attempt == 1


@pytest.mark.parametrize("document", [[], {"modules": 3}, {"phase": "running"}, "x"])
def test_something_else(run: RunDir, document: object) -> None:
    write_json(run.state, document)
    with pytest.raises(DataError, match=r"state\.json' is (damaged|not a JSON object)"):
        RunState.read(run)


def test_shell_status() -> None:
    assert shell_status(0) == (0, None)
    assert shell_status(75) == (75, None)
    assert shell_status(-9) == (137, "SIGKILL")
    assert shell_status(137) == (137, "SIGKILL")  # of a process that stands for the killed one
    assert shell_status(-40) == (168, "signal 40")
    assert shell_status(255) == (255, None)
