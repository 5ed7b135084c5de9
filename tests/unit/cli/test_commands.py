"""Commands that start nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml

from dni_runtime import __version__
from dni_runtime.launch.prepare import prepare
from dni_runtime.launch.records import Record, create_run
from dni_runtime.launch.slurm.job import JobRecord
from dni_runtime.launch.state import RunState
from dni_runtime.rundir import append_line
from dnictl.main import ALIASES, COMMANDS, cli
from tests.unit.cli.conftest import Dnictl

WriteChain = Callable[..., Path]


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*COMMANDS, *ALIASES])
def test_every_command_has_help_with_an_example(name: str, dnictl: Dnictl) -> None:
    result = dnictl(name, "--help")
    assert (result.code, result.err) == (0, "")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    if not command.hidden and not isinstance(command, click.Group):
        assert "Example" in result.out
        assert "dnictl " in result.out.split("Example", 1)[1]


def test_aliases_name_the_command(dnictl: Dnictl) -> None:
    assert "Usage: dnictl validate" in dnictl("check", "--help").out


def test_the_list_of_commands(dnictl: Dnictl) -> None:
    out = dnictl("--help").out.split("Commands:")[1]
    listed = [line.split()[0] for line in out.splitlines() if line[2:3].isalpha()]
    assert [name for name in listed if name in COMMANDS] == [
        n for n in COMMANDS if n not in ("supervise", "reference")
    ]


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["ps"], ["completion", "bash"]])
def test_quick_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from dnictl.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'zmq', 'numpy', 'jinja2'} & set(sys.modules)),"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "[]"


def test_version(dnictl: Dnictl) -> None:
    assert dnictl("--version").out == f"dnictl, version {__version__}\n"
    assert dnictl("version").out.startswith(f"dni-runtime {__version__}\n")
    assert dnictl("version", "--json").json["dni-runtime"] == __version__


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, dnictl: Dnictl) -> None:
    result = dnictl("completion", shell)
    assert result.code == 0
    assert "_DNICTL_COMPLETE" in result.out


@pytest.mark.parametrize("command", ["status", "logs", "resume"])
def test_names_of_runs_are_completed(
    command: str, dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DNICTL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"dnictl {command} sm")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert dnictl().out == "plain,small-1\n"


def test_a_bug_leaves_a_traceback_in_a_file(
    dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken() -> None:
        raise RuntimeError("a bug\nof two lines")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("dnictl.runs").ps, "callback", lambda **_: broken())
    with monkeypatch.context() as context:
        context.setattr("sys.argv", ["dnictl", "--debug", "ps"])
        result = dnictl("--debug", "ps")
        assert result.code == 70
        assert "in broken" in result.err
    result = dnictl("ps")
    assert result.code == 70
    first, second = result.err.splitlines()
    assert first == "dnictl: internal error: RuntimeError: a bug"
    (file,) = tmp_path.glob("dnictl-traceback-*.txt")
    assert str(file) in second
    assert "in broken" in file.read_text()


def test_ctrl_c(dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("dnictl.runs").ps, "callback", interrupted)
    assert dnictl("ps").code == 130


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dnictl", "schema"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (1, b"")


# --- chain files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["mlp", "cnn"])
def test_templates_are_valid(template: str, dnictl: Dnictl, folder: Path) -> None:
    assert dnictl("init", "--template", template).code == 0
    result = dnictl("validate", "--json")
    assert result.code == 0
    assert result.json["valid"] is True
    assert len(result.json["modules"]) >= 3


def test_init_overwrites_nothing(dnictl: Dnictl, folder: Path) -> None:
    (folder / "chain.yaml").write_text("mine")
    result = dnictl("init")
    assert result.code == 64
    assert "exists already" in result.err
    assert (folder / "chain.yaml").read_text() == "mine"


def test_validate(dnictl: Dnictl, write_chain: WriteChain) -> None:
    path = write_chain()
    result = dnictl("validate", path)
    assert result.code == 0
    assert "chain 'small' is valid, 2 modules, 2,474 parameters" in result.out
    document = dnictl("validate", path, "--json").json
    assert document["parameters"] == 64 * 32 + 32 + 64 + 32 * 10 + 10
    assert document["modules"][0]["output"] == "float32[B x 32]"
    assert document["modules"][1]["interface"] is None
    assert document["total_steps"] == 2 * document["batches_per_epoch"]


def test_config_can_be_read_back(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    result = dnictl("config", write_chain())
    assert result.code == 0
    document = yaml.safe_load(result.out)
    assert document["modules"][0]["optimizer"] == {"Adam": {"lr": 0.002}}
    (folder / "again.yaml").write_text(result.out)
    assert dnictl("config", "again.yaml", "--json").json == document


def test_schema(dnictl: Dnictl) -> None:
    document = dnictl("schema").json
    assert document["type"] == "object"
    assert "modules" in document["properties"]


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def record(write_chain: WriteChain, folder: Path) -> Record:
    """A run that has been made and not started."""
    create_run(folder / "runs" / "small-1", prepare(write_chain()), backend="process")
    return Record.read(folder / "runs" / "small-1")


def ended(record: Record, phase: str, code: int, **more: object) -> RunState:
    state = RunState.begin("process", 1, record.modules)
    state.phase, state.exit_code = phase, code  # type: ignore[assignment]
    state.ended = state.started + 65
    for name, value in more.items():
        setattr(state, name, value)
    state.write(record.run)
    return state


def test_dry_run_prints_the_plan(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    path = write_chain()
    result = dnictl("up", path, "--dry-run", "--backend", "process", "--run-dir", "my run")
    assert result.code == 0
    assert f"# run {folder}/my run, backend process" in result.out
    assert result.out.count("-m dni_runtime.worker") == 2
    document = dnictl("up", path, "--dry-run", "--backend", "process", "--json").json
    assert [worker["module"] for worker in document["workers"]] == ["bottom", "top"]
    assert sorted(entry.name for entry in folder.iterdir()) == ["chain.yaml"]


def test_one_module_by_hand(dnictl: Dnictl, write_chain: WriteChain) -> None:
    write_chain()
    result = dnictl("run", "top", "--run-dir", "r", "--dry-run", "--backend", "process")
    assert result.code == 0
    assert "--module top" in result.out
    result = dnictl("run", "tip", "--run-dir", "r")
    assert result.code == 64
    assert "its modules: bottom, top" in result.err
    result = dnictl("run", "top", "--run-dir", "r", "--backend", "process", "--resume", "newest")
    assert result.code == 64
    assert "--resume 'newest'" in result.err
    assert "auto, own, none" in result.err
    assert not Path("r").exists()


def test_no_runs(dnictl: Dnictl) -> None:
    assert dnictl("ps").code == 0
    assert dnictl("ps", "--json").json == []
    for command in (
        ["status"],
        ["logs"],
        ["stop"],
        ["wait"],
        ["resume"],
        ["restart", "top"],
        ["events"],
        ["export", "-o", "x"],
        ["tensorboard"],
    ):
        result = dnictl(*command)
        assert result.code == 64
        assert "there are no runs in 'runs'" in result.err


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


def test_runs_from_the_environment(
    dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DNICTL_RUNS", str(tmp_path / "none"))
    assert dnictl("ps", "--json").json == []
    assert len(dnictl("ps", "--json", "--runs", record.run.root.parent).json) == 1


@pytest.mark.parametrize(("phase", "code"), [("finished", 0), ("stopped", 75), ("stopped", 130)])
def test_wait_ends_as_the_run_did(phase: str, code: int, dnictl: Dnictl, record: Record) -> None:
    ended(record, phase, code)
    result = dnictl("wait")
    assert result.code == code
    assert result.out.startswith(f"small-1: {phase} after 1 min 5 s, epoch 0/2")
    assert dnictl("wait", "--json").json["state"] == phase


def test_wait_tells_what_failed(dnictl: Dnictl, record: Record) -> None:
    state = ended(record, "failed", 70, failed="top", error="…")
    top = state.modules["top"]
    top.state, top.exit_code, top.signal = "failed", 137, "SIGKILL"
    top.log = str(record.run.log("top", 1))
    record.run.log("top", 1).write_text("".join(f"line {n}\n" for n in range(30)))
    state.write(record.run)
    result = dnictl("wait")
    assert result.code == 70
    assert "module 'top' (attempt 1) was killed by SIGKILL" in result.err
    assert top.log in result.err
    assert "| line 29" in result.err
    assert "| line 1\n" not in result.err
    assert f"→ dnictl resume {record.run.root}" in result.err


def test_wait_with_a_limit(dnictl: Dnictl, record: Record) -> None:
    ended(record, "running", 0)
    assert dnictl("wait", "--timeout", "0").code == 124


def test_a_lost_supervisor(dnictl: Dnictl, record: Record) -> None:
    ended(record, "running", 0, born=1)
    assert dnictl("status", "--json").json["state"] == "lost"
    result = dnictl("wait")
    assert result.code == 70
    assert "is gone" in result.err
    assert dnictl("stop").out == "small-1: lost\n"


def test_resume_of_a_run_that_has_no_need(dnictl: Dnictl, record: Record) -> None:
    ended(record, "finished", 0)
    result = dnictl("resume")
    assert result.code == 64
    assert "dnictl export" in result.err
    ended(record, "running", 0)
    result = dnictl("resume")
    assert result.code == 64
    assert "dnictl stop" in result.err


def test_resume_plans_the_next_attempt(dnictl: Dnictl, record: Record) -> None:
    ended(record, "stopped", 75, attempt=3)
    document = dnictl("resume", "--dry-run", "--json").json
    assert [worker["attempt"] for worker in document["workers"]] == [4, 4]
    result = dnictl("resume", "--from", "12")
    assert result.code == 64
    assert "no complete checkpoint '12'" in result.err


@pytest.mark.parametrize(
    ("phase", "code", "hint"),
    [("finished", 0, "dnictl status small-1"), ("stopped", 75, "dnictl resume small-1")],
)
def test_restart_needs_a_supervisor(
    phase: str, code: int, hint: str, dnictl: Dnictl, record: Record
) -> None:
    ended(record, phase, code)
    result = dnictl("restart", "top")
    assert result.code == 64
    assert f"'small-1' is {phase}" in result.err
    assert hint in result.err
    assert not record.run.restart_request("top").exists()


def test_export_without_a_checkpoint(dnictl: Dnictl, record: Record) -> None:
    result = dnictl("export", "-o", "m.safetensors")
    assert result.code == 74
    assert "no complete checkpoint" in result.err


def test_export_overwrites_nothing(dnictl: Dnictl, record: Record, folder: Path) -> None:
    (folder / "m.safetensors").write_text("mine")
    assert dnictl("export", "-o", "m.safetensors").code == 64
    assert (folder / "m.safetensors").read_text() == "mine"


def test_tensorboard(dnictl: Dnictl, record: Record, folder: Path) -> None:
    ended(record, "finished", 0)
    line = {"time": 1.0, "module": "top", "attempt": 1, "kind": "train", "step": 3, "loss": 0.5}
    append_line(record.run.metrics("top"), line)
    result = dnictl("tensorboard", "--follow")
    assert result.out == f"{record.run.tensorboard}: 1 new events of 1 modules\n"
    assert "tensorboard --logdir" in result.err
    assert dnictl("tensorboard", "--logdir", "logs", "--json").json == {
        "run": "small-1", "logdir": "logs/small-1", "events": {"top": 1},
    }  # fmt: skip
    assert list((folder / "logs" / "small-1" / "top").iterdir())


def test_a_run_between_two_starts_of_its_job(
    dnictl: Dnictl, record: Record, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on: ``restart`` says that it waits, and ``--follow`` waits for its end."""
    ended(record, "stopped", 75)
    JobRecord("7", (0, 0), None, {}, "info", 0.0).write(record.run)
    (folder / "squeue").write_text(
        "#!/bin/sh\n"
        'if [ "$(cat answers)" -gt 0 ]; then echo "PENDING|BeginTime|"; fi\n'
        "echo $(($(cat answers) - 1)) >answers\n"
    )
    (folder / "sacct").write_text("#!/bin/sh\n")
    for name in ("squeue", "sacct"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    answers = folder / "answers"

    answers.write_text("1\n")
    result = dnictl("restart", "top")
    assert result.code == 64
    assert "'small-1' is queued" in result.err
    assert "dnictl status" in result.err

    monkeypatch.setattr("dnictl.tensorboard._POLL_S", 0.0)
    answers.write_text("2\n")
    assert dnictl("tensorboard", "--follow").code == 0
    assert int(answers.read_text()) < 0


def test_tensorboard_without_its_package(
    dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    result = dnictl("tensorboard")
    assert result.code == 69
    assert "pip install 'dni-runtime[tensorboard]'" in result.err


# --- logs -----------------------------------------------------------------------------------------


@pytest.fixture
def logs(record: Record) -> Record:
    ended(record, "finished", 0)
    bottom = "2026-01-01 10:00:00,100 INFO one\n2026-01-01 10:00:00,300 INFO three\n  more\n"
    record.run.log("bottom", 1).write_text(bottom)
    record.run.log("top", 1).write_text("2026-01-01 10:00:00,200 INFO two\nunfinished")
    return record


def test_logs_are_merged_by_time(dnictl: Dnictl, logs: Record) -> None:
    lines = dnictl("logs").out.splitlines()
    assert lines == [
        "bottom | 2026-01-01 10:00:00,100 INFO one",
        "top    | 2026-01-01 10:00:00,200 INFO two",
        "top    | unfinished",
        "bottom | 2026-01-01 10:00:00,300 INFO three",
        "bottom |   more",
    ]
    assert sorted(dnictl("logs", "-f").out.splitlines()) == sorted(lines)


def test_some_logs(dnictl: Dnictl, logs: Record) -> None:
    assert dnictl("logs", "top").out.splitlines()[1] == "unfinished"
    assert dnictl("logs", "small-1", "top", "--tail", "1").out == "unfinished\n"
    assert len(dnictl("logs", "--tail", "2").out.splitlines()) == 2
    first = json.loads(dnictl("logs", "bottom", "--json").out.splitlines()[0])
    assert first == {
        "module": "bottom", "attempt": 1, "time": "2026-01-01 10:00:00,100",
        "line": "2026-01-01 10:00:00,100 INFO one",
    }  # fmt: skip


def test_logs_that_are_not_there(dnictl: Dnictl, logs: Record) -> None:
    assert dnictl("logs", "small-1", "tip").code == 64
    result = dnictl("logs", "--attempt", "9")
    assert (result.code, result.out) == (0, "")
    assert "no such logs" in result.err


def test_doctor(dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch) -> None:
    from dni_runtime.launch import doctor
    from dni_runtime.launch.doctor import Check

    found = [
        Check("torch", "ok", "2.13", "always"),
        Check("apptainer", "missing", "none", "containers", "install it"),
        Check("gpu", "missing", "none"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(found))
    assert dnictl("doctor").code == 0
    result = dnictl("doctor", "--backend", "apptainer")
    assert result.code == 69
    assert "→ install it" in result.out
    document = dnictl("doctor", "--json").json
    assert document["ready"] is True
    assert [check["name"] for check in document["checks"]] == ["torch", "apptainer", "gpu"]
