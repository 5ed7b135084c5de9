"""Protocols for starting workers, and their implementation by processes of this host.

A step of a cluster's job (``srun``) and a connection to another host (``ssh``) are processes of
this host, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from dni_runtime.errors import UnavailableError
from dni_runtime.files import closing
from dni_runtime.plan.plan import WorkerPlan
from dni_runtime.run.documents.state import ModuleState, lives, process_birth
from dni_runtime.schedulers import child
from dni_runtime.schedulers.child import kill_session
from dni_runtime.schedulers.forkserver import ForkServer
from dni_runtime.schedulers.runtimes import worker_argv

CHILD = (sys.executable, "-I", "-S", child.__file__)
"""The beginning of a command that runs another one (``schedulers/child.py``)."""


class Process(Protocol):
    """One started worker, as this host sees it."""

    @property
    def pid(self) -> int:
        """Id of the process that stands for the worker."""

    def poll(self) -> int | None:
        """Return None while it runs, then its exit code, or minus the signal that killed it.

        What stands for a worker reports the worker's signal like a shell, as 128 + n. SIGKILL also
        says that nobody knows: its last report may (``pool.reap``).
        """

    def kill(self) -> None:
        """Kill the process and all that it started on this host."""


class Starter(Protocol):
    """Starts workers as planned."""

    def start(self, worker: WorkerPlan) -> Process:
        """Start one worker, with its output in its log file.

        Raises ``UnavailableError`` if the program cannot be started.
        """

    def adopt(self, worker: WorkerPlan, module: ModuleState) -> Process:
        """Return a worker that a former supervisor started; ``module`` is its recorded state."""

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        """Kill workers, by module, on all hosts."""

    def gone(self, modules: Collection[str]) -> Collection[str]:
        """Return the modules whose workers have exited elsewhere, but not their local processes."""


class LocalProcess:
    """A worker as a process of this host, in a session of its own.

    So it has no controlling terminal: Ctrl-C reaches the supervisor only, and Apptainer's starter
    forwards signals (with a controlling terminal it does not).
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
                self.kill()  # the rest of its session, before its id can be reused
        return self._popen.poll()

    def kill(self) -> None:
        if self._popen.returncode is None:
            kill_session(self._popen.pid)


class AdoptedProcess:
    """A worker that is not a child of this process: a former supervisor's, or a fork server's."""

    def __init__(self, module: ModuleState, server: ForkServer | None = None) -> None:
        self.pid = module.pid or 0
        self._module = module.model_copy()
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and not lives(self._module):
            code = None if self._server is None else self._server.code(self.pid)
            self._code = -signal.SIGKILL if code is None else code
        return self._code

    def kill(self) -> None:
        if lives(self._module):
            kill_session(self.pid)


class LocalStarter:
    """Starts workers as processes of this host; without a container, as forks of one process.

    They continue when this process dies: a later supervisor adopts them.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,  # a plan's own variables extend it
        *,
        # a worker's command on this host
        render: Callable[[WorkerPlan], Sequence[str]] = worker_argv,
        connected: bool = False,  # to another host (``schedulers/child.py``, send)
    ) -> None:
        self._render = render
        self._connected = connected
        self._environ = dict(os.environ if environ is None else environ)
        self._servers: dict[tuple[str, ...], ForkServer] = {}

    def start(self, worker: WorkerPlan) -> Process:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            with closing(os.open(worker.log, flags, 0o600)) as log:
                return self._fork(worker, log) or self._execute(worker, log)
        except OSError as error:
            raise UnavailableError(f"module {worker.module!r} cannot be started: {error}") from None

    def _fork(self, worker: WorkerPlan, log: int) -> AdoptedProcess | None:
        """Start a plain process of this host; None if it is another one, or there is no server."""
        if self._render is not worker_argv or worker.image is not None:
            return None
        # libraries read variables when they are loaded: another environment, another server
        key = (worker.python, *(f"{name}={it}" for name, it in sorted(worker.environment.items())))
        if key not in self._servers:
            environ = {**self._environ, **worker.environment}
            self._servers[key] = ForkServer(worker.python, environ, worker.run)
        server = self._servers[key]
        pid = server.start(worker.argv(), log)
        if pid is None:
            return None
        return AdoptedProcess(ModuleState(pid=pid, born=process_birth(pid)), server)

    def _execute(self, worker: WorkerPlan, log: int) -> LocalProcess:
        command = list(self._render(worker))
        if self._connected:
            command = [*CHILD, "send", *command]
        elif worker.image is not None and worker.node is None:  # a container of this host
            command = [*CHILD, "watch", *command]
        return LocalProcess(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environ, **worker.environment},
                start_new_session=True,
            )
        )

    def adopt(self, worker: WorkerPlan, module: ModuleState) -> AdoptedProcess:
        return AdoptedProcess(module)

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        for process in workers.values():
            process.kill()

    def gone(self, modules: Collection[str]) -> Collection[str]:
        return ()
