"""Commands on runs that nothing works on: ``ps``, ``status``, ``wait``, ``resume``, ``export``."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from safetensors.torch import save

from dni_runtime import Run, __version__
from dni_runtime.api import run as run_module
from dni_runtime.errors import CheckpointError, UsageError, WorkerError
from dni_runtime.files import append_line, read_json, write_json
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.cuts import sealed
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.worker.background import repeating
from dnictl.main import COMMANDS, Commands, cli, main
from dnictl.runs import conclude
from tests.unit.cli.conftest import Dnictl, WriteChain, ended


def test_no_runs(dnictl: Dnictl) -> None:
    assert dnictl("ps").code == 0
    assert dnictl("ps", "--json").json == []


def test_ps_and_status(dnictl: Dnictl, record: Record) -> None:
    ended(record, "finished", 0)
    out = dnictl("ps").out
    assert "small-1" in out
    assert "finished" in out
    (row,) = dnictl("ps", "--json").json
    assert (row["run"], row["state"]) == ("small-1", "finished")
    document = dnictl("status", "--json").json
    assert [module["module"] for module in document["modules"]] == ["bottom", "top"]
    assert "bottom" in dnictl("status", "small").out
    page = dnictl("status", "--prometheus").out
    assert 'dni_running{run="small-1",module="top"} ' in page
    assert page.endswith("\n")


def test_status_until_the_end(
    dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(record, "running", 0)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            ended(record, "finished", 0)

    monkeypatch.setattr(run_module, "time", SimpleNamespace(sleep=sleep))
    out = dnictl("status", "--watch").out
    assert naps == [2.0] * 3
    assert out.count("running") == 3
    assert out.count("finished") == 1
    both = dnictl("status", "--watch", "--json")
    assert (both.code, "leave out --json" in both.err) == (64, True)


def test_figures_that_are_old(dnictl: Dnictl, record: Record) -> None:
    """On a full disk a worker cannot report what it does."""
    ended(record, "running", 0)
    for name, age_s in (("bottom", 0), ("top", 125)):
        report = record.run.worker(name)
        write_json(report, {"attempt": 1, "state": "running", "time": time.time() - age_s})
        os.utime(report, (time.time() - age_s,) * 2)
    state = RunState.read(record.run)
    for module in state.modules.values():
        module.state = "running"
    state.save(record.run)
    assert "top: these figures are 2 min 5 s old" in dnictl("status").err
    bottom, top = dnictl("status", "--json").json["modules"]
    assert bottom["age_s"] is None
    assert 125 <= top["age_s"] < 200
    state.phase = "stopped"
    state.save(record.run)
    assert "old" not in dnictl("status").err


def test_a_run_that_has_stalled(dnictl: Dnictl, record: Record) -> None:
    why = "module 'top' has been busy with one batch for 130 s, at 7 of the stream"
    ended(record, "stalled", 0, error=why)
    for shown in (dnictl("status"), dnictl("ps")):
        assert "stalled" in shown.out
        assert why in shown.out + shown.err
    for document in (dnictl("status", "--json").json, *dnictl("ps", "--json").json):
        assert (document["state"], document["error"]) == ("stalled", why)
    assert RunState.read(record.run).active


def test_the_last_events(dnictl: Dnictl, record: Record) -> None:
    ended(record, "finished", 0)
    for number in range(30):
        append_line(record.run.events, {"time": float(number), "event": f"event{number}"})
    assert len(dnictl("events").out.splitlines()) == 30
    last = dnictl("events", "--tail", "2").out
    assert [line.split()[2] for line in last.splitlines()] == ["event28", "event29"]
    assert dnictl("events", "--tail", "0").out == ""


def test_runs_from_the_environment(
    dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DNICTL_RUNS", str(tmp_path / "none"))
    assert dnictl("ps", "--json").json == []
    assert len(dnictl("ps", "--json", "--runs", record.run.root.parent).json) == 1


def test_a_run_commands_no_terminal(dnictl: Dnictl, record: Record) -> None:
    """Its name is what somebody else has written."""
    ended(record, "finished", 0)
    record.model_copy(update={"name": "\x1b]0;mine\x07"}).write(record.run.record)
    for command in ("ps", "status", "status --prometheus", "wait", "tensorboard"):
        result = dnictl(*command.split())
        assert result.code == 0
        assert not {"\x1b", "\x07"} & set(result.out + result.err), command
    assert dnictl("wait").out.startswith("\\u001b]0;mine\\u0007: finished")


@pytest.mark.parametrize(("phase", "code"), [("finished", 0), ("stopped", 75), ("stopped", 130)])
def test_wait_ends_as_the_run_did(phase: str, code: int, dnictl: Dnictl, record: Record) -> None:
    ended(record, phase, code)
    result = dnictl("wait")
    assert result.code == code
    assert result.out.startswith(f"small-1: {phase} after 1 min 5 s, epoch 0/2")
    assert dnictl("wait", "--json").json["state"] == phase


def test_wait_that_ran_out_of_time_has_figures(dnictl: Dnictl, record: Record) -> None:
    ended(record, "running", 0, pid=os.getpid(), ended=None)
    result = dnictl("wait", "--timeout", "0", "--json")
    assert (result.code, result.json["state"]) == (124, "running")
    assert result.err == "dnictl: small-1 is still running\n"
    assert dnictl("wait", "--timeout", "0").out == ""


def test_wait_tells_what_failed(dnictl: Dnictl, record: Record) -> None:
    state = ended(record, "failed", 70, failed="top", error="…")
    top = state.modules["top"]
    top.state, top.exit_code, top.signal = "failed", 137, "SIGKILL"
    top.log = str(record.run.log("top", 1))
    record.run.log("top", 1).write_text("".join(f"line {n}\n" for n in range(30)))
    state.save(record.run)
    result = dnictl("wait")
    assert result.code == 70
    assert "module 'top' (attempt 1) was killed by SIGKILL" in result.err
    assert top.log in result.err
    assert "| line 29" in result.err
    assert "| line 1\n" not in result.err
    assert f"→ dnictl resume {record.run.root}" in result.err


@pytest.mark.parametrize(("phase", "code"), [("failed", 70), ("stopped", 75)])
def test_the_end_is_what_has_happened_not_what_could_be_written(
    record: Record, phase: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk the state says what it said before."""
    state = ended(record, "running", 0)
    state.phase, state.exit_code = phase, None  # type: ignore[assignment]
    with pytest.raises((SystemExit, WorkerError)) as error:
        conclude(Run(record), state)
    ending = error.value
    assert (ending.code if isinstance(ending, SystemExit) else ending.exit_code) == code
    assert f"small-1: {phase}" in capsys.readouterr().out


def test_a_run_ends_as_it_did_though_nobody_can_be_told(
    dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script requeues its job by this code, and its log may lie on a full disk."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for phase, code in (("stopped", 75), ("failed", 70), ("finished", 0)):
        ended(record, phase, code)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Full())
            patch.setattr(sys, "stderr", Full())
            with pytest.raises(SystemExit) as exit:
                main(["wait", "--runs", str(record.run.root.parent)])
        assert exit.value.code == code


def test_wait_with_a_limit(dnictl: Dnictl, record: Record) -> None:
    ended(record, "running", 0)
    assert dnictl("wait", "--timeout", "0").code == 124


def test_a_lost_supervisor(dnictl: Dnictl, record: Record) -> None:
    ended(record, "running", 0, born=1)
    assert dnictl("status", "--json").json["state"] == "lost"
    result = dnictl("wait")
    assert result.code == 70
    assert "is gone" in result.err
    stopped = dnictl("stop")
    assert (stopped.code, stopped.out) == (70, "small-1: lost\n")
    assert "has written its last checkpoint" in stopped.err


def test_stop_waits_as_long_as_the_supervisor_does(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module writes its checkpoint slowly, and the supervisor shows that it lives."""
    monkeypatch.setattr(run_module, "_STOP_TIMEOUT_S", 0.5)
    state = RunState.begin("process", 1, record.modules)
    state.phase = "stopping"
    state.save(record.run)
    until_s = time.monotonic() + 1.5

    def beat() -> None:
        state.phase = "stopping" if time.monotonic() < until_s else "stopped"
        state.save(record.run)

    with repeating("beat", 0.1, beat):
        assert Run(record).stop(0.1).phase == "stopped"
    assert time.monotonic() >= until_s
    state.phase = "stopping"
    state.save(record.run)
    with pytest.raises(UsageError, match="does not answer"):
        Run(record).stop(0.1)


def test_resume_of_a_finished_run(dnictl: Dnictl, record: Record) -> None:
    ended(record, "finished", 0)
    write_cut(record, 10)
    result = dnictl("resume")
    assert (result.code, "dnictl export" in result.err) == (64, True)


def test_resume_plans_the_next_attempt(dnictl: Dnictl, record: Record) -> None:
    ended(record, "stopped", 75, attempt=3)
    document = dnictl("resume", "--dry-run", "--json").json
    assert [worker["attempt"] for worker in document["workers"]] == [4, 4]


def write_cut(record: Record, cut: int, *, whole: bool = True) -> None:
    for module in record.modules:
        part = record.run.checkpoint(cut, module)
        part.parent.mkdir(exist_ok=True)
        data = save({"layers.0.weight": torch.zeros(3)})
        part.with_suffix(".json").write_text(sealed(data, {"bytes": len(data)}))
        part.with_suffix(".safetensors").write_bytes(data if whole else data[:-1] + b"x")


def test_resume_from_a_damaged_checkpoint(dnictl: Dnictl, record: Record) -> None:
    """Nothing has begun, and so nothing newer is gone, when it is found."""
    ended(record, "stopped", 75)
    write_cut(record, 10, whole=False)
    write_cut(record, 20)
    result = dnictl("resume", "--from", "10")
    assert result.code == 72
    assert "the part of module 'bottom' in checkpoint 10" in result.err
    assert "is damaged: its SHA-256" in result.err
    assert not record.run.events.exists()


def test_resume_without_a_whole_checkpoint(dnictl: Dnictl, record: Record) -> None:
    ended(record, "stopped", 75)
    write_cut(record, 10)
    tensors = record.run.checkpoint(10, "top").with_suffix(".safetensors")
    size = tensors.stat().st_size
    tensors.write_bytes(b"")
    result = dnictl("resume")
    assert result.code == 72
    assert f"has 0 bytes, not {size}, and no older checkpoint is intact" in result.err
    assert not record.run.events.exists()


def test_export_of_a_damaged_checkpoint(
    dnictl: Dnictl, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    write_cut(record, 10)
    write_cut(record, 20, whole=False)
    result = dnictl("export", "-o", "m.safetensors")
    assert result.code == 72
    assert "the part of module 'bottom' in checkpoint 20" in result.err
    assert "take another one with --from: 10" in result.err
    record.run.checkpoint(20, "top").with_suffix(".safetensors").unlink()
    dnictl("export", "-o", "m.safetensors")
    assert "top.safetensors'; using checkpoint 10" in caplog.text


def test_resume_of_a_run_of_another_version(dnictl: Dnictl, record: Record) -> None:
    ended(record, "stopped", 75)
    document = read_json(record.run.record) or {}
    document["versions"]["dni_runtime"] = "0.0.9"
    write_json(record.run.record, document)
    result = dnictl("resume", "--dry-run")
    assert result.code == 0
    assert f"small-1: created by dni-runtime 0.0.9, resumed with {__version__}" in result.err


@pytest.fixture
def foreign(record: Record, monkeypatch: pytest.MonkeyPatch) -> Record:
    """The run belongs to somebody else, who says that it is of tomorrow."""
    document = read_json(record.run.record)
    write_json(record.run.record, document | {"created": time.time() + 86400})
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    else:
        for path in (record.run.root, *record.run.root.rglob("*")):
            os.chown(path, 65534, 65534)
    return record


REFUSED = (
    ("export", "small-1", "-o", "m.safetensors"),
    ("resume", "small-1"),
    ("resume", "small-1", "--dry-run"),
    ("stop", "small-1"),
    ("restart", "top", "small-1"),
    ("scale", "top=2", "small-1"),
    ("balance", "small-1"),
    ("tensorboard", "small-1"),
    ("up", "--dry-run", "--carry", "small-1"),
    ("submit", "--dry-run", "--carry", "small-1"),
    ("run", "top", "--run-dir", "runs/small-1"),
    ("supervise", "runs/small-1"),
    ("reference", "runs/small-1", "--threads", "1"),
)


def test_the_page_on_security_tells_which_commands_only_read_a_run() -> None:
    """All others that take a run ask for trust, since that can run code."""
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    section = page.partition("\n## What is code\n")[2].partition("\n## ")[0]
    rows = {row.split(" | ")[0].strip("| "): row for row in section.splitlines() if "|" in row}
    assert {"a chain file", "a run directory", "an image"} < rows.keys()
    assert "an exported file, `.safetensors`" in rows
    told = re.findall(r"`([a-z]+)`", rows["a run directory"].partition("its plan names.")[2])
    context = click.Context(cli)
    commands = {name: Commands.get_command(cli, context, name) for name in COMMANDS}
    options = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
        if command is not None and any(one.name == "run" for one in command.params)
    }
    reading = {name for name in options if "--trust" not in options[name]}
    # 'reference' refuses others' runs; 'ps' takes none, 'logs' also takes names of modules
    assert reading - {"reference"} == {*told} - {"ps", "logs"}


def test_a_run_of_somebody_else_is_read_and_not_executed(
    dnictl: Dnictl, foreign: Record, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dni_runtime.image.apptainer.SETUP_PREFIXES", ())  # no Apptainer
    monkeypatch.setenv("PATH", str(folder))
    ended(foreign, "stopped", 75)
    write_cut(foreign, 8)
    foreign.run.log("top", 1).write_text("said\n")
    for read in (("status", "small-1"), ("ps",), ("events", "small-1"), ("logs", "small-1")):
        assert dnictl(*read).code == 0, read
    assert dnictl("wait", "small-1").code == 75
    before = {path: path.stat().st_mtime_ns for path in foreign.run.root.rglob("*")}
    for command in REFUSED:
        result = dnictl(*command)
        assert result.code == 64, (command, result.err)
        assert "small-1' belongs to " in result.err, command
        assert "--trust" in result.err, command
    assert {path: path.stat().st_mtime_ns for path in foreign.run.root.rglob("*")} == before
    trusted = dnictl("resume", "small-1", "--dry-run", "--trust")
    assert trusted.code == 0, trusted.err
    assert "belongs to" not in dnictl("balance", "small-1", "--trust").err


def test_the_newest_run_is_the_users_own(
    dnictl: Dnictl, foreign: Record, folder: Path, write_chain: WriteChain
) -> None:
    result = dnictl("status")
    assert (result.code, "no runs of yours" in result.err) == (64, True)
    assert "small-1" in result.err
    if os.geteuid() == 0:
        create_run(folder / "runs" / "own", prepare(write_chain()), backend="process")
        assert dnictl("status", "--json").json["run"] == "own"
        (folder / "runs" / "zz").symlink_to(foreign.run.root)
        assert dnictl("status", "--json").json["run"] == "own"


def test_python_asks_for_trust_too(foreign: Record) -> None:
    run = Run.open(foreign.run.root)
    assert run.state().phase == "new"
    for does in (run.model, run.evaluate, run.resume, run.take_over, run.balance, run.plan):
        with pytest.raises(UsageError, match="belongs to"):
            does()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Run.find("small-1", foreign.run.root.parent, trust=True).model()


def test_runs_that_cannot_be_read_are_skipped(
    dnictl: Dnictl, record: Record, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others are private, beside one's own in the same folder."""
    (folder / "runs" / "private").mkdir()
    (folder / "runs" / "private" / "run.json").touch()
    stat = Path.stat

    def refused(path: Path, **more: bool) -> os.stat_result:
        if path.parent.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", refused)
    assert dnictl("status", "--json").json["run"] == "small-1"


HOSTILE = "\x1b]52;c;cm0=\x07\x1b[2J\x9b2J\u202e[/red]"
SHOWN = r"\u001b]52;c;cm0=\u0007\u001b[2J\u009b2J\u202e[/red]"


def test_what_workers_wrote_cannot_command_the_terminal(
    dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(record, "failed", 70, error=HOSTILE)
    record.run.worker("top").parent.mkdir(exist_ok=True)
    report = {"module": "top", "attempt": 1, "host": HOSTILE, "warning": HOSTILE}
    write_json(record.run.worker("top"), report)
    append_line(record.run.events, {"time": 0.0, "event": "run_stopping", "reason": HOSTILE})
    record.run.log("top", 1).parent.mkdir(exist_ok=True)
    record.run.log("top", 1).write_text(f"{HOSTILE}\n")
    assert "\x1b]52;c;cm0=\x07" in dnictl("logs").out  # a pipe takes the log as it is
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for command in ("status", "wait", "logs", "events"):
        result = dnictl(command)
        assert SHOWN in result.out + result.err
        said = result.out + result.err + dnictl(command, "--json").out
        for raw in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"):
            assert raw not in said


def test_names_of_folders_are_no_markup(dnictl: Dnictl, record: Record, folder: Path) -> None:
    (folder / "x[").mkdir()
    (folder / "runs").rename(folder / "x[/red][bold]")
    result = dnictl("status", "--runs", "x[/red][bold]")
    assert (result.code, result.err) == (0, "")
    assert "x[/red][bold]" in result.out


def test_a_new_run_has_the_name_that_is_given(dnictl: Dnictl, record: Record, folder: Path) -> None:
    ended(record, "finished", 0)
    command = ("up", "--backend", "process", "--dry-run", "--json")
    named = dnictl(*command, "--name", "first.2")
    assert (Path(named.json["run"]).name, named.err) == ("first.2", "")
    taken = dnictl(*command, "--name", "small-1")
    assert taken.code == 64
    assert "already holds a run" in taken.err
    ended(record, "running", 0, pid=os.getpid(), ended=None)
    assert dnictl(*command).err == "another run of this chain is running: dnictl stop small-1\n"
