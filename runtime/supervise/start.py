"""Start of a planned run, here or in the background, and cleanup after a killed supervisor."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from dni_runtime.errors import UsageError, WorkerError
from dni_runtime.files import write_json
from dni_runtime.image.apptainer import host_environment
from dni_runtime.plan.plan import LaunchPlan, RestartPlan
from dni_runtime.run.documents.reports import ENDED, Report
from dni_runtime.run.documents.state import ModuleState, RunState, lives
from dni_runtime.run.lease import Lease, LeaseError
from dni_runtime.run.lines import last_lines
from dni_runtime.run.rundir import RunDir, socket_path
from dni_runtime.schedulers import child
from dni_runtime.schedulers.child import kill_session
from dni_runtime.schedulers.interrupts import catching_signals
from dni_runtime.schedulers.runtime_files import remove_runtime_files
from dni_runtime.schedulers.schedulers import SCHEDULERS
from dni_runtime.schedulers.slurm.commands import own_job
from dni_runtime.supervise.callbacks import calling_back
from dni_runtime.supervise.pool import LEAVE_S
from dni_runtime.supervise.stall import StallRule
from dni_runtime.supervise.supervisor import Supervisor

_DETACH_TIMEOUT_S = 60.0
_RELEASED_S = 5.0  # between the report of a run's end and its release
_KILLED_S = 10.0  # for the kernel to free the memory of a killed worker


def take(run: RunDir) -> Lease:
    """Become the owner of a run, so that no other process supervises it.

    A supervisor reports the end of a run shortly before it releases it: that is waited for.
    """
    until = time.monotonic() + _RELEASED_S
    while True:
        try:
            lease = Lease.take(run, own_job(), told=partial(print, file=sys.stderr))
            break
        except UsageError:
            if RunState.read(run).phase not in ENDED or time.monotonic() >= until:
                raise
            time.sleep(0.05)
    atexit.register(lease.release)  # also if the run is never started
    return lease


@dataclass(frozen=True)
class Launch:
    """A plan and the right to start it."""

    run: RunDir
    plan: LaunchPlan
    lease: Lease
    adopt: RunState | None = None  # of a run whose running workers are taken over instead

    @classmethod
    def of(cls, run: RunDir, plan: LaunchPlan, lease: Lease | None = None) -> Launch:
        """Become the owner of a run, and keep the plan in its directory."""
        lease = lease or take(run)
        write_json(run.plan, plan.to_json())
        return cls(run, plan, lease)

    def supervise(self, observe: Callable[[RunState], None] | None = None) -> RunState:
        """Start the workers, by the plan's scheduler, and supervise them.

        ``observe`` gets the run's state a few times a second, and at the end.
        """
        try:
            supervisor = self.supervisor()
        except BaseException as error:
            self._clean_up(error)
            raise
        with calling_back(self.run, supervisor.state, observe) as look:
            try:
                state = supervisor.run(look)
            except BaseException as error:
                self._clean_up(error)
                raise
            self._clean_up(None)  # at once: another start would have its sockets in the same place
        return state

    def _clean_up(self, error: BaseException | None) -> None:
        if not isinstance(error, LeaseError):  # else the new owner needs what is there
            with catching_signals(lambda number: None):  # the run has ended
                SCHEDULERS[self.plan.scheduler].clean_up(self.plan)

    def supervisor(self) -> Supervisor:
        """Return the supervisor that :meth:`supervise` runs."""
        plan, scheduler = self.plan, SCHEDULERS[self.plan.scheduler]
        # Containers get the host's variables, except those that would change the image's Python.
        environ = host_environment(os.environ) if plan.backend == "apptainer" else dict(os.environ)
        starter, hosts = scheduler.starter(environ), scheduler.hosts(plan)
        return Supervisor(self.run, plan, starter, hosts=hosts, lease=self.lease, adopt=self.adopt)

    def detach(self) -> int:
        """Start a supervisor in the background, wait until it runs, and return its process id."""
        process = self.spawn()
        process.returncode = 0  # it is detached now: avoids a ResourceWarning
        return process.pid

    def spawn(self, *, tied: bool = False) -> subprocess.Popen[bytes]:
        """Start a supervisor as a process of its own, and wait until it runs.

        ``tied``: it stops the run when this thread of this process ends.
        """
        self.run.supervisor_log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-P", "-m", "dnictl", "supervise", "--trust", str(self.run.root)]
        if tied:
            argv = [sys.executable, "-I", "-S", child.__file__, "tied", str(os.getpid()), *argv]
        with self.run.supervisor_log.open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self.lease.hand_over(),
            )
        deadline = time.monotonic() + _DETACH_TIMEOUT_S
        while time.monotonic() < deadline:
            # It may have started and exited between two polls.
            if RunState.read(self.run).pid == process.pid:
                return process
            if process.poll() is not None:
                break
            time.sleep(0.1)
        process.terminate()  # else its workers would run unnoticed
        try:
            process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.lease.release()
        lines = last_lines(self.run.supervisor_log)
        raise WorkerError("\n  | ".join(["the supervisor did not start", *lines]))


def end_leftovers(run: RunDir, state: RunState, grace_s: float) -> RunState:
    """Stop workers that have no supervisor, after a common checkpoint; return the run's state then.

    Those that take longer than ``grace_s`` are killed, unless they save something.
    """
    if state.phase not in ("unsupervised", "lost") or not state.pid:  # it never had a supervisor
        return state
    if state.host != socket.gethostname() or (state.phase == "unsupervised" and not state.here):
        raise UsageError(
            f"run {run.root.name!r} was started on {state.host}; its supervisor does not respond",
            hint=f"make sure that no process of it runs there, then remove {str(run.state)!r}",
        )
    alive = {name: module for name, module in state.modules.items() if lives(module)}
    for name, module in alive.items():
        if Report.read(run.worker(name)).of(module.attempt).state == "stopping":
            continue  # a second signal would end it without its checkpoint
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(module.pid or 0), signal.SIGTERM)
    rule = StallRule(list(alive), RestartPlan().stall_s)

    def save(names: Iterable[str]) -> bool:
        """Whether any of these still saves something."""
        reports = {name: Report.read(run.worker(name)).of(alive[name].attempt) for name in names}
        rule.look(time.monotonic(), reports)
        return any(map(rule.saves, reports))

    alive = _after(grace_s, alive, save)
    for module in alive.values():
        kill_session(int(module.pid or 0))
    _after(_KILLED_S, alive)
    remove_runtime_files(run, socket_path(run.root))
    return RunState.read(run)


def _after(
    within_s: float,
    modules: dict[str, ModuleState],
    save: Callable[[Iterable[str]], bool] = lambda names: False,
) -> dict[str, ModuleState]:
    """Wait until the workers have exited; return those that still run after ``within_s``.

    While some of them save something, all get more time.
    """
    until = time.monotonic() + within_s
    while modules and time.monotonic() < until:
        time.sleep(0.1)
        modules = {name: module for name, module in modules.items() if lives(module)}
        if save(modules):
            until = max(until, time.monotonic() + LEAVE_S)
    return modules
