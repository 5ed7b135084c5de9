"""``dnictl`` and workers, as forks of a process that has imported torch.

Tests start hundreds of them. Each is a process with a session of its own, but pays for no import.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import setproctitle

import dni_runtime
import dnictl

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    found.name
    for package in (dni_runtime, dnictl)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.endswith("__main__")
])  # fmt: skip


class Program:
    """``python -m MODULE ARGUMENT…``, with the interface of :class:`subprocess.Popen`.

    Of ``environ``, what torch reads is that of the tests. Without a log for its output and errors,
    :meth:`communicate` returns them.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        log: Path | None = None,
    ) -> None:
        self.args = [sys.executable, "-m", module, *arguments]
        self._files = [log, log] if log else [self._file("output"), self._file("errors")]
        self._fork = _FORKS.Process(
            target=_run, args=(module, self.args, folder, dict(environ), self._files)
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

    @property
    def returncode(self) -> int | None:
        return self._fork.exitcode

    def poll(self) -> int | None:
        return self._fork.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._fork.join(timeout)
        if self._fork.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._fork.exitcode

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


def _run(
    module: str, args: list[str], folder: Path, environ: dict[str, str], files: list[Path]
) -> None:
    setproctitle.setproctitle(" ".join(args))  # before its place, the environment, is gone
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for descriptor, file in zip((1, 2), files, strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    sys.argv = args[2:]
    sys.path[0] = str(folder)  # as 'python -m' has it
    runpy.run_module(module, run_name="__main__", alter_sys=True)
