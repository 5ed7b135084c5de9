"""The program itself: help, completion, bugs, and commands that need no chain and no run."""

from __future__ import annotations

import importlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dni_runtime import __version__
from dni_runtime.errors import DniError, exited
from dni_runtime.image.oci import INDEX, Index
from dni_runtime.release.names import VERSION
from dni_runtime.release.store import Store
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import ENTRIES
from dnictl.main import ALIASES, COMMANDS, GROUPS, cli
from dnictl.runs import WAIT_TIMEOUT
from tests.unit.cli.conftest import Dnictl

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", [*COMMANDS, *ALIASES])
def test_every_command_has_help_with_an_example(name: str, dnictl: Dnictl) -> None:
    result = dnictl(name, "--help")
    assert (result.code, result.err) == (0, "")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    if not command.hidden and not isinstance(command, click.Group):
        assert "Example" in result.out
        assert "dnictl " in result.out.split("Example", 1)[1]
    for one in command.params:
        assert "options." not in str(one.metavar), "a name of the code"


def test_aliases_name_the_command(dnictl: Dnictl) -> None:
    assert "Usage: dnictl validate" in dnictl("check", "--help").out


def test_the_list_of_commands(dnictl: Dnictl) -> None:
    out = dnictl("--help").out.split("--help  Show")[1]
    assert [line[:-1] for line in out.splitlines() if line[:1].isalpha()] == [*GROUPS]
    listed = [line.split()[0] for line in out.splitlines() if line[2:3].isalpha()]
    assert [name for name in listed if name in COMMANDS] == [
        n for n in COMMANDS if n not in ("supervise", "service", "reference")
    ]
    assert "..." not in out  # each summary fits a terminal of 80 columns


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("statsu", "status"), ("chekc", "check"), ("bench modul", "module"), ("up --jsonn", "--json")],
)
def test_a_misspelt_command_or_option(typed: str, meant: str, dnictl: Dnictl) -> None:
    result = dnictl(*typed.split())
    assert result.code == 64
    assert f"Did you mean {meant!r}?" in result.err


def test_commands_and_exit_codes_are_documented() -> None:
    text = (DOCS / "commands.md").read_text("utf-8")
    commands, codes = text.split("## Exit codes")
    shown = set(re.findall(r"[a-z]+", " ".join(re.findall(r"`[^`]*`", commands))))
    assert set(COMMANDS) - {"supervise", "service", "reference"} | set(ALIASES) <= shown
    rows = re.findall(r"^\| ([\d, ]+) \|", codes, re.MULTILINE)
    documented = {int(code) for row in rows for code in row.split(",")}
    by_signals = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    kinds = [DniError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    own = {kind.exit_code for kind in kinds if kind.__module__ == DniError.__module__}
    assert documented == own | by_signals | {0, 1, WAIT_TIMEOUT}


def test_what_a_run_directory_holds_is_documented() -> None:
    page = (DOCS / "commands.md").read_text("utf-8")
    block = page.split("## What a run directory holds")[1].split("```")[1]
    paths = [path for line in block.splitlines() for path in line.split("   ")[0].split()]
    assert {path.partition("/")[0] for path in paths if path != ".json"} == {
        entry.rstrip(",") for entry in ENTRIES
    }


def words_of_commands(page: str) -> Iterator[list[str]]:
    """The words of each command on a page, in its blocks and in its lines."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    for line in lines:
        for part in re.split(r"&&|[|;#]|\$\(", line):
            found = re.search(r"\bdnictl\s+([a-z].*)", part)
            yield re.findall(r"[\w-]+", found[1]) if found else []


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=str)
def test_options_on_a_page_are_those_of_the_command(page: Path) -> None:
    for words in words_of_commands(page.read_text("utf-8")):
        command: click.Command | None = cli
        for word in words:
            if isinstance(command, click.Group) and word != "COMMAND":
                command = command.get_command(click.Context(cli), word)
        assert command is not None, words
        allowed = {option for one in command.params for option in one.opts} | {"-h", "--help"}
        assert {word for word in words if re.match("--?[a-z]", word)} <= allowed, words


def test_version(dnictl: Dnictl) -> None:
    assert dnictl("--version").out == f"dnictl, version {__version__}\n"
    assert dnictl("version").out.startswith(f"dni-runtime {__version__}\n")
    assert dnictl("version", "--json").json["dni-runtime"] == __version__


@pytest.mark.parametrize("shell", ["zsh", "fish"])  # bash is asked for its version
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


def test_completion_executes_nothing(dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named release is looked for, and its images put together, when the command is run."""
    asked: list[None] = []
    monkeypatch.setattr("dni_runtime.image.apptainer.usable_apptainer", lambda: asked.append(None))
    monkeypatch.setenv("_DNICTL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "dnictl up --images digits:1.2.0 --dry")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert dnictl().out == "plain,--dry-run\n"
    assert asked == []


def test_a_release_that_is_removed_is_told_in_json(
    dnictl: Dnictl, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    layout = Store().layout
    for version in "12":
        index = Index(manifests=(), annotations={VERSION: version})
        layout.name({f"digits:{version}": layout.add(index.encode(), INDEX)})
    answer = dnictl("models", "--remove", "digits:1", "--json").json
    assert answer == {"removed": "digits:1", "bytes": len(index.encode())}
    assert dnictl("models", "--remove", "digits:2").out == ""
    assert Store().releases() == {}


def test_settings_of_the_environment_are_no_options(
    dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNICTL_IMAGES", "elsewhere")
    assert "no service runs" in dnictl("serve", "--stop").err


def test_a_bug_leaves_a_traceback_in_a_file(
    dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken() -> None:
        raise RuntimeError("a bug\nof two lines")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        importlib.import_module("dnictl.status").ps, "callback", lambda **_: broken()
    )
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

    monkeypatch.setattr(importlib.import_module("dnictl.status").ps, "callback", interrupted)
    assert dnictl("ps").code == 130


def test_doctor(dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch) -> None:
    from dni_runtime.api import doctor
    from dni_runtime.api.doctor import Check

    found = [
        Check("torch", "ok", "2.13", "always"),
        Check("apptainer", "missing", "none", "containers", "install it"),
        Check("gpu", "missing", "none"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(found))
    result = dnictl("doctor")
    assert result.code == 0
    assert result.out.endswith("\nready for: process\n")
    result = dnictl("doctor", "--backend", "apptainer")
    assert result.code == 69
    assert "→ install it" in result.out
    assert "the apptainer backend cannot be used here: see apptainer" in result.out
    document = dnictl("doctor", "--json").json
    assert (document["ready"], document["backends"]) == (True, ["process"])
    assert [check["name"] for check in document["checks"]] == ["torch", "apptainer", "gpu"]

    found[1] = Check("apptainer", "ok", "1.4.5", "containers")
    for options in ([], ["--backend", "apptainer"]):
        result = dnictl("doctor", *options)
        assert result.code == 0
        assert result.out.endswith("\nready for: process, apptainer\n")


def test_a_file_that_cannot_be_written_is_named(dnictl: Dnictl, folder: Path) -> None:
    (folder / "file").write_text("")
    result = dnictl("init", str(folder / "file" / "project"))
    assert result.code != 70
    assert str(folder / "file") in result.err


LEAVES = """\
import sys
from torch import nn


class Leaves(nn.Linear):
    def forward(self, x):
        sys.exit(0)
"""
CHAIN = """\
name: leaves
data: {dataset: digits, flatten: true}
modules:
  - {name: a, layers: [{import: "leaves_early:Leaves", args: {in_features: 64, out_features: 10}}]}
"""


@pytest.mark.parametrize("command", ["validate", "up"])
def test_code_that_ends_the_program_is_an_error(
    dnictl: Dnictl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("leaves_early.py").write_text(LEAVES)
    Path("chain.yaml").write_text(CHAIN)
    monkeypatch.delitem(sys.modules, "leaves_early", raising=False)
    result = dnictl(command, "chain.yaml")
    assert result.code == 78
    assert re.search(r"leaves_early.py:7 ends the program: sys.exit\(0\)", result.err)


@pytest.mark.parametrize(
    ("package", "place"), [("my_script", r"where\.py:3 ends"), ("dni_runtime.worker.start", None)]
)
def test_whose_code_reads_a_wrong_command_line(package: str, place: str | None) -> None:
    """argparse exits for whoever calls it: a script without a guard, or the program itself."""
    code = "import argparse\n\nargparse.ArgumentParser('x').parse_args(['--no-such-option'])\n"
    with pytest.raises(SystemExit) as caught:
        exec(compile(code, "where.py", "exec"), {"__name__": package})
    # What called this test is not a part of it.
    trace = caught.value.__traceback__
    assert trace is not None
    found = exited(caught.value.with_traceback(trace.tb_next))
    assert (found is None) == (place is None)
    assert place is None or re.search(place, str(found))
