"""Starting workers: a small protocol, and processes of this host behind it.

A cluster's steps (``srun``) are processes of this host too; another way to start workers needs
another :class:`Starter` and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from dni_runtime.errors import UnavailableError
from dni_runtime.launch import child
from dni_runtime.launch.plan import WorkerPlan
from dni_runtime.launch.state import ModuleState, lives, session_of


class Process(Protocol):
    """One started worker, as this host sees it."""

    @property
    def pid(self) -> int:
        """Id of the process that stands for the worker."""

    def poll(self) -> int | None:
        """None while it runs, then its exit code, or minus the number of the signal it died of."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process; no error when it is gone."""

    def kill(self) -> None:
        """End the process and all that it started on this host, at once."""


class Starter(Protocol):
    """Starts workers as planned."""

    def start(self, worker: WorkerPlan) -> Process:
        """Start one worker, with its output in its log file.

        Raises:
            UnavailableError: The program cannot be started.
        """

    def adopt(self, worker: WorkerPlan, module: ModuleState, ended: Callable[[], int]) -> Process:
        """A worker that a former supervisor has started.

        Args:
            worker: How.
            module: What is known of its process.
            ended: How it has ended, as :meth:`Process.poll` tells; called when it has.
        """

    def send_all(self, workers: Mapping[str, Process], number: signal.Signals) -> bool:
        """Send a signal to some workers, by module; tells whether that was possible."""

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        """End some workers, by module, wherever they run, at once."""

    def gone(self, modules: Collection[str]) -> Collection[str]:
        """Those modules whose workers have ended elsewhere, though their processes here go on."""


class Hosts(Protocol):
    """The hosts that workers run on, where some may be lost."""

    def lost(self, hosts: Collection[str], *, at_once: bool) -> Sequence[str]:
        """Those of the hosts that are lost for good, as far as that is known.

        Args:
            hosts: Their names.
            at_once: Whether there is a reason to look now.
        """

    def move(
        self, workers: Sequence[WorkerPlan], names: Collection[str]
    ) -> list[WorkerPlan] | None:
        """The named workers on other hosts; None where there is no room.

        Args:
            workers: All workers of the run, as they are placed now.
            names: Modules of those that must go elsewhere.
        """


class LocalProcess:
    """A worker as a process of this host, in a session of its own.

    In its own session it is out of the terminal's reach: Ctrl-C comes to the supervisor alone, and
    Apptainer's starter passes signals on (it does so only without a controlling terminal).
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        if self._popen.returncode is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._popen.pid, options) is not None:
                self.kill()  # what it left behind, while its session still has its number
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        # To this process only: Apptainer's starter forwards the signal to the program in the
        # container, for which a copy sent to the whole group would be the second, "leave at once".
        self._popen.send_signal(number)

    def kill(self) -> None:
        if self._popen.returncode is None:
            kill_session(self._popen.pid)


class AdoptedProcess:
    """A worker that another process has started, which is gone.

    Args:
        module: Its process, which leads a session.
        ended: How it has ended, for :meth:`poll`.
    """

    def __init__(self, module: ModuleState, ended: Callable[[], int]) -> None:
        self.pid = module.pid or 0
        self._module = replace(module)
        self._ended = ended

    def poll(self) -> int | None:
        return None if lives(self._module) else self._ended()

    def send(self, number: signal.Signals) -> None:
        if lives(self._module):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        if lives(self._module):
            kill_session(self.pid)


def kill_session(leader: int) -> None:
    """Kill a process and all of its session.

    The process group is not enough: Apptainer's FUSE helpers have groups of their own, and stay
    when the starter is killed.

    Args:
        leader: A process that leads its session, or has been started a moment ago to do so.
    """
    members = [leader]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and session_of(int(entry.name)) == leader:
            members.append(int(entry.name))
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def guarded(
    argv: Sequence[str], *, mode: Literal["exec", "watch"] = "exec", tied: bool = True
) -> list[str]:
    """A command that gets SIGTERM when the thread that starts it is gone, by ``launch.child``.

    Args:
        argv: The command.
        mode: How: see there.
        tied: Without it the command goes on.
    """
    wrapper = [sys.executable, "-I", "-S", str(Path(child.__file__))]
    return [*wrapper, mode, str(os.getpid()), str(int(signal.SIGTERM) if tied else 0), *argv]


class LocalStarter:
    """Starts workers as processes of this host.

    Tied ones get SIGTERM when this process dies; others go on without it. To start tied ones it
    must be called on a thread that lives as long as the workers shall: the kernel counts the
    *thread* that started a process as its parent (prctl(2), PR_SET_PDEATHSIG).

    Args:
        environ: The environment that a plan's own variables come on top of.
        tied: Whether the workers end with this process.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, *, tied: bool = True) -> None:
        self._tied = tied
        self._environ = dict(os.environ if environ is None else environ)

    def start(self, worker: WorkerPlan) -> LocalProcess:
        mode: Literal["exec", "watch"] = "exec" if worker.image is None else "watch"
        try:
            descriptor = os.open(worker.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                popen = subprocess.Popen(
                    guarded(worker.argv, mode=mode, tied=self._tied),
                    stdin=subprocess.DEVNULL,
                    stdout=descriptor,
                    stderr=descriptor,
                    env={**self._environ, **worker.environment},
                    start_new_session=True,
                )
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnavailableError(f"module {worker.module!r} cannot be started: {error}") from None
        return LocalProcess(popen)

    def adopt(
        self, worker: WorkerPlan, module: ModuleState, ended: Callable[[], int]
    ) -> AdoptedProcess:
        return AdoptedProcess(module, ended)

    def send_all(self, workers: Mapping[str, Process], number: signal.Signals) -> bool:
        for process in workers.values():
            process.send(number)
        return True

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        for process in workers.values():
            process.kill()

    def gone(self, modules: Collection[str]) -> Collection[str]:
        return ()
