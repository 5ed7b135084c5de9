"""The program dnictl in a process of its own: what it imports, and how it ends."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest


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
    assert ("_DNICTL_COMPLETE" in done.stdout) == (arguments == ["completion", "bash"])


@pytest.mark.parametrize("command", [["schema"], ["profile", "list"]])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, command: list[str]) -> None:
    """Neither of plain text nor of a table."""
    with subprocess.Popen(
        [sys.executable, "-m", "dnictl", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (1, b"")


def test_a_folder_that_has_been_removed(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = f"cd gone; rmdir ../gone; exec {sys.executable} -m dnictl ps"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 64
    assert "the current folder has been removed\n  → cd to another one" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", "<&- >&-"])
def test_streams_that_the_caller_has_closed(tmp_path: Path, closed: str) -> None:
    """Files that the program opens do not take their places."""
    code = (
        "import os; from dnictl import main; main.run_program = lambda command: None\n"
        "main.program(); print(os.open('file', os.O_CREAT) > 2, file=sys.stderr)"
    )
    for command in ("-m dnictl version", f'-c "import sys; {code}"'):
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} {command} {closed}"],
            capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True,
        )  # fmt: skip
        assert done.stderr == ("True\n" if "file" in command else "")


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color(tmp_path: Path, environ: dict[str, str], coloured: bool) -> None:
    own = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    terminal, other = pty.openpty()
    try:
        command = [sys.executable, "-m", "dnictl", "status"]
        subprocess.run(command, stderr=other, cwd=tmp_path, env=own | environ, check=False)
        assert (b"\x1b[" in os.read(terminal, 4096)) == coloured
    finally:
        os.close(terminal)
        os.close(other)


def test_a_full_disk_is_no_bug(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dnictl", "version", "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 74
    assert "the file system failed: No space left on device\n  → make room" in done.stderr
    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart"),
        ("raise PermissionError(13, 'Permission denied', 'libtorch.so')", "libtorch.so"),
        ("from torch._C import *", "ModuleNotFoundError: No module named 'torch._C'"),
        ("raise ImportError('undefined symbol: ncclCommSplit')", "ImportError: undefined symbol"),
        ("import torch.inner", "RuntimeError: compiled for another numpy"),
    ],
)
def test_a_torch_that_does_not_load_is_no_bug(broken: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(broken)
    (tmp_path / "torch" / "inner.py").write_text("raise RuntimeError('compiled for another numpy')")
    chain = tmp_path / "chain.yaml"
    chain.write_text((files("dni_runtime.definitions") / "chains" / "mlp.yaml").read_text())

    def said(*arguments: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dnictl", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 69
        assert told in done.stderr + done.stdout
        assert "install a build of torch that fits this machine" in done.stderr + done.stdout
        return done.stderr

    validated = said("validate", chain)
    assert validated.startswith("dnictl: error: torch cannot be loaded here: ")
    assert "'dnictl doctor'" in validated
    said("doctor")


def test_a_file_that_hides_a_package_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("")
    (tmp_path / "chain.yaml").write_text("name: small")
    done = subprocess.run(
        [sys.executable, "-m", "dnictl", "validate", tmp_path / "chain.yaml"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 64
    assert done.stderr.startswith(f"dnictl: error: '{tmp_path}/yaml.py' hides the package 'yaml'")


def test_a_service_has_a_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dnictl", "service", tmp_path],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 64
    assert "is not a service's folder" in done.stderr
