"""``dnictl`` and workers, as forks of a process that has imported torch.

Tests start hundreds of them. Each is a process with a session of its own, but pays for no import;
nor do the supervisors and fork servers that these start. In containers, by ssh and in Slurm's jobs,
and in tests/integration, Python starts as it does for users.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import types
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver as forks
from pathlib import Path
from typing import Any

import setproctitle

import dni_runtime
import dnictl
from dni_runtime.schedulers import forkserver
from dni_runtime.supervise import start

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    found.name
    for package in (dni_runtime, dnictl)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.endswith("__main__")
])  # fmt: skip


_path = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]
"""Where modules are, beside the current folder."""


class Program:
    """``python -m MODULE ARGUMENT…``, with the interface of :class:`subprocess.Popen`.

    Of ``environ``, what torch reads is that of the tests. Without a log for its output and errors,
    :meth:`communicate` returns them. ``isolated`` is Python's ``-P``.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        log: Path | None = None,
        *,
        isolated: bool = False,
        stdin: socket.socket | None = None,
    ) -> None:
        self.args = [sys.executable, *(["-P"] if isolated else []), "-m", module, *arguments]
        self.returncode: int | None = None
        self._files = [log, log] if log else [self._file("output"), self._file("errors")]
        self._fork = _FORKS.Process(
            target=_run,
            args=(module, self.args, folder, dict(environ), self._files, _path, stdin),
        )
        self._fork.start()
        multiprocessing.process._children.discard(self._fork)  # else all are waited for at the end

    def _file(self, name: str) -> Path:
        descriptor = os.memfd_create(name)
        weakref.finalize(self, os.close, descriptor)
        return Path(f"/proc/{os.getpid()}/fd/{descriptor}")

    @property
    def pid(self) -> int:
        assert self._fork.pid is not None
        return self._fork.pid

    def poll(self) -> int | None:
        self.returncode = self._fork.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._fork.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        output, errors = (file.read_text("utf-8") for file in self._files)
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _popen(
    args: Sequence[str], *, stdin: int, stdout: Any, env: dict[str, str], **settings: Any
) -> Program | subprocess.Popen[bytes]:
    """Start a supervisor or a fork server as a program, if it would import the same as we."""
    python, isolated, _, module, *arguments = args
    if (python, isolated) != (sys.executable, "-P") or not env.get("DNI_QUICK_START"):
        return subprocess.Popen(args, stdin=stdin, stdout=stdout, env=env, **settings)
    log = Path(os.devnull if stdout == subprocess.DEVNULL else stdout.name)
    if stdin == subprocess.DEVNULL:
        return Program(module, arguments, Path.cwd(), env, log, isolated=True)
    with socket.socket(fileno=os.dup(stdin)) as requests:
        return Program(module, arguments, Path.cwd(), env, log, isolated=True, stdin=requests)


STARTS = (start, forkserver)
STAND_IN = types.SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
"""What these modules have for ``subprocess``."""


def _run(
    module: str,
    args: list[str],
    folder: Path,
    environ: dict[str, str],
    files: list[Path],
    path: list[str],
    stdin: socket.socket | None,
) -> None:
    global _path
    setproctitle.setproctitle(" ".join(args))  # before its place, the environment, is gone
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for descriptor, file in zip((1, 2), files, strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    if stdin is not None:
        os.dup2(stdin.fileno(), 0)
        stdin.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    isolated = args[1] == "-P"
    sys.argv = args[args.index(module) :]
    _path = path
    sys.path[:] = path if isolated else [str(folder), *path]  # as 'python -m' has it
    vars(forks._forkserver)["ensure_running"] = lambda: None  # it is: this is a fork of it
    for starts in STARTS:
        vars(starts)["subprocess"] = STAND_IN
    runpy.run_module(module, run_name="__main__", alter_sys=True)
