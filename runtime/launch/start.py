"""Starting a planned run, here or in the background, and ending what a killed supervisor left."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dni_runtime.errors import UsageError, WorkerError
from dni_runtime.image.apptainer import host_environment
from dni_runtime.launch.interrupts import catching_signals
from dni_runtime.launch.lease import Lease
from dni_runtime.launch.plan import LaunchPlan
from dni_runtime.launch.processes import LocalStarter, Starter, kill_session
from dni_runtime.launch.runtime_files import remove_runtime_files
from dni_runtime.launch.slurm.allocation import clean_up
from dni_runtime.launch.slurm.commands import component_jobs
from dni_runtime.launch.slurm.nodes import JobNodes
from dni_runtime.launch.slurm.starter import SlurmStarter
from dni_runtime.launch.state import ModuleState, RunState, lives
from dni_runtime.launch.supervisor import Supervisor
from dni_runtime.lines import last_lines
from dni_runtime.rundir import RunDir, read_json, socket_path, write_json

_DETACH_TIMEOUT_S = 60.0
_KILLED_S = 10.0  # for the kernel to take the memory of a killed worker apart


def planned(run: RunDir) -> LaunchPlan:
    """The plan that a run directory holds.

    Raises:
        UsageError: It holds none.
    """
    document = read_json(run.plan)
    if document is None:
        raise UsageError(f"{str(run.root)!r} holds no launch plan")
    return LaunchPlan.from_json(document)


def take(run: RunDir) -> Lease:
    """Become the owner of a run: no other process may supervise it meanwhile.

    Raises:
        UsageError: Another process owns it.
    """
    job = os.environ.get("SLURM_JOB_ID")
    lease = Lease.take(run, job, told=partial(print, file=sys.stderr))
    atexit.register(lease.release)  # also where it comes to nothing
    return lease


@dataclass(frozen=True)
class Launch:
    """A plan, and the right to start it.

    Attributes:
        run: The run directory.
        plan: What to start.
        lease: The right to.
        adopt: The run's state if its workers go on and shall not be started anew.
    """

    run: RunDir
    plan: LaunchPlan
    lease: Lease
    adopt: RunState | None = None

    @classmethod
    def of(cls, run: RunDir, plan: LaunchPlan, lease: Lease | None = None) -> Launch:
        """Become the owner of a run, and keep the plan in its directory.

        Raises:
            UsageError: Another process owns the run.
        """
        lease = lease or take(run)
        write_json(run.plan, plan.to_json())
        return cls(run, plan, lease)

    def supervise(self, observe: Callable[[RunState], None] | None = None) -> RunState:
        """Start the workers, on this host or as steps of this job, and watch them to their end.

        Args:
            observe: Called with the run's state a few times a second, and at the end.

        Raises:
            DniError: A worker cannot be started.
        """
        try:
            return self.supervisor().run(observe)
        finally:
            if self.plan.workers[0].node is not None:
                with catching_signals(lambda number: None):  # how the run ended is known by now
                    clean_up(self.plan)

    def supervisor(self) -> Supervisor:
        """The supervisor that :meth:`supervise` runs."""
        plan = self.plan
        job = component_jobs(os.environ) if plan.workers[0].node is not None else None
        # Containers get the host's variables, except those that would change the image's Python.
        environ = host_environment(os.environ) if plan.backend == "apptainer" else dict(os.environ)
        starter: Starter = LocalStarter(environ, tied=False)
        hosts = None
        if job is not None:
            starter = SlurmStarter(job, environ)
            # modules are not moved between the components of a heterogeneous job
            if len({worker.node for worker in plan.workers}) > 1 and "," not in job:
                hosts = JobNodes(job, plan)
        return Supervisor(self.run, plan, starter, hosts=hosts, lease=self.lease, adopt=self.adopt)

    def detach(self) -> int:
        """Start it under a supervisor in the background, and wait until that has begun.

        Returns:
            The supervisor's process id.

        Raises:
            WorkerError: The supervisor ended at once, or did not begin in time.
        """
        self.run.supervisor_log.parent.mkdir(parents=True, exist_ok=True)
        with self.run.supervisor_log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dnictl", "supervise", str(self.run.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self.lease.hand_over(),
            )
        deadline = time.monotonic() + _DETACH_TIMEOUT_S
        while time.monotonic() < deadline:
            # It may have begun and ended between two looks.
            if RunState.read(self.run).pid == process.pid:
                process.returncode = 0  # it is on its own from now on: no ResourceWarning
                return process.pid
            if process.poll() is not None:
                break
            time.sleep(0.1)
        process.terminate()  # else its workers would be unknown to all
        try:
            process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.lease.release()
        lines = last_lines(self.run.supervisor_log)
        raise WorkerError("\n  | ".join(["the supervisor did not start", *lines]))


def end_leftovers(run: RunDir, state: RunState, grace_s: float) -> RunState:
    """Stop workers that go on without a supervisor, after a common checkpoint.

    Those that take too long are killed.

    Args:
        run: The run directory.
        state: The run's state.
        grace_s: Seconds that they have.

    Returns:
        The run's state when they have gone.

    Raises:
        UsageError: They are on another host.
    """
    if state.phase not in ("unsupervised", "lost"):
        return state
    if state.host != socket.gethostname():
        raise UsageError(
            f"run {run.root.name!r} was started on {state.host}, whose supervisor is silent",
            hint=f"make sure that nothing of it runs there, then remove {str(run.state)!r}",
        )
    left = [module for module in state.modules.values() if lives(module)]
    for module in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(module.pid or 0), signal.SIGTERM)
    left = _after(grace_s, left)
    for module in left:
        kill_session(int(module.pid or 0))
    _after(_KILLED_S, left)
    remove_runtime_files(run, socket_path(run.root))
    return RunState.read(run)


def _after(within_s: float, modules: list[ModuleState]) -> list[ModuleState]:
    """Those whose workers live after so many seconds; sooner where none does."""
    until = time.monotonic() + within_s
    while modules and time.monotonic() < until:
        time.sleep(0.1)
        modules = [module for module in modules if lives(module)]
    return modules
