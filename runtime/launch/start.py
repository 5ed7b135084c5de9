"""Starting a run: from its record and what the host offers to a plan, here or in the background."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from dni_runtime.errors import DivergedError, DniError, UsageError, WorkerError
from dni_runtime.image.apptainer import host_environment
from dni_runtime.launch.host import Site, check_host
from dni_runtime.launch.journal import how_it_ended
from dni_runtime.launch.lease import Lease
from dni_runtime.launch.plan import LaunchPlan, Placement, make_plan
from dni_runtime.launch.prepare import place_of
from dni_runtime.launch.processes import LocalStarter, kill_session
from dni_runtime.launch.records import Record
from dni_runtime.launch.slurm.commands import component_jobs
from dni_runtime.launch.slurm.nodes import JobNodes
from dni_runtime.launch.slurm.starter import SlurmStarter
from dni_runtime.launch.state import ModuleState, RunState, lives
from dni_runtime.launch.supervisor import Supervisor
from dni_runtime.launch.traces import remove_traces
from dni_runtime.rundir import RunDir, read_json, socket_path, write_json
from dni_runtime.spec import ChainSpec, WorkerSpec

_DETACH_TIMEOUT_S = 60.0
_KILLED_S = 10.0  # for the kernel to take the memory of a killed worker apart


def site_again(record: Record, *, elsewhere: bool = False) -> Site:
    """What there is for a run that was made before, with its backend and its images.

    Args:
        record: The run.
        elsewhere: As in :func:`check_host`.

    Raises:
        DniError: As :func:`check_host`.
    """
    chain, workers = record.specs()
    return check_host(
        chain,
        workers,
        wanted="apptainer" if record.backend == "apptainer" else "process",
        images=next((path.parent for path in record.images.values()), Path("images")),
        data=record.data,
        place=partial(place_of, record.run.chain_file),
        elsewhere=elsewhere,
    )


def plan_here(
    root: Path,
    chain: ChainSpec,
    workers: tuple[WorkerSpec, ...],
    site: Site,
    *,
    data: Path | None,
    attempt: int = 1,
    resume: str = "auto",
    log_level: str = "info",
    supervised: bool = True,
) -> LaunchPlan:
    """Plan a run on this host; writes nothing.

    Args:
        root: The run directory.
        chain: The chain.
        workers: What each worker serves.
        site: What the host offers.
        data: Folder or file of the data.
        attempt: Which start of the run this is.
        resume: ``auto``, ``none`` or the stream position of a checkpoint.
        log_level: How much the workers write to their logs.
        supervised: Whether a supervisor will start the workers.
    """
    placement = placement_here(
        root, site, data=data, attempt=attempt, resume=resume, log_level=log_level
    )
    return make_plan(chain, workers, replace(placement, supervised=supervised))


def placement_here(
    root: Path,
    site: Site,
    *,
    data: Path | None,
    attempt: int = 1,
    resume: str = "auto",
    log_level: str = "info",
) -> Placement:
    """Where and how workers start on this host; see :func:`plan_here`."""
    root = root.absolute()
    return Placement(
        run=root,
        backend=site.backend,
        sockets=socket_path(root),
        data=data,
        tool=site.tool,
        images=site.images,
        data_folder=data.parent if data is not None and data.is_file() else data,
        mounts=site.mounts,
        attempt=attempt,
        resume=resume,
        python=sys.executable,
        python_path=os.environ.get("PYTHONPATH", ""),
        log_level=log_level,
    )


def write_plan(run: RunDir, plan: LaunchPlan) -> None:
    """Keep the plan that is about to be started."""
    write_json(run.plan, plan.to_json())


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
    """Become the owner of a run, which nobody else may supervise meanwhile.

    Raises:
        UsageError: Somebody owns it already.
    """
    job = os.environ.get("SLURM_JOB_ID")
    lease = Lease.take(run, job, told=partial(print, file=sys.stderr))
    atexit.register(lease.release)  # also where it comes to nothing
    return lease


def supervisor_of(
    run: RunDir, plan: LaunchPlan, lease: Lease | None = None, *, adopt: RunState | None = None
) -> Supervisor:
    """A supervisor that starts the plan's workers, on this host or as steps of this job.

    Args:
        run: The run directory.
        plan: What to start.
        lease: The right to; taken here where it was not.
        adopt: The run's state, where its workers go on and shall not be started anew.

    Raises:
        UsageError: Somebody supervises the run already.
    """
    lease = lease or take(run)
    job = component_jobs(os.environ) if plan.workers[0].node is not None else None
    # Containers get the host's variables, but for those that would change the image's Python.
    environ = host_environment(os.environ) if plan.backend == "apptainer" else dict(os.environ)
    if job is None:
        local = LocalStarter(environ, tied=False)
        return Supervisor(run, plan, local, lease=lease, adopt=adopt)
    several = len({worker.node for worker in plan.workers}) > 1
    # modules are not moved between the components of a heterogeneous job
    hosts = JobNodes(job, plan) if several and "," not in job else None
    starter = SlurmStarter(job, environ)
    return Supervisor(run, plan, starter, hosts=hosts, lease=lease, adopt=adopt)


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
    remove_traces(run, socket_path(run.root))
    return RunState.read(run)


def _after(within_s: float, modules: list[ModuleState]) -> list[ModuleState]:
    """Those whose workers live after so many seconds; sooner where none does."""
    until = time.monotonic() + within_s
    while modules and time.monotonic() < until:
        time.sleep(0.1)
        modules = [module for module in modules if lives(module)]
    return modules


def detach(run: RunDir, lease: Lease) -> int:
    """Start the run's plan under a supervisor in the background, and wait until it has begun.

    Args:
        run: The run.
        lease: The right to supervise it, which goes to the supervisor.

    Returns:
        The supervisor's process id.

    Raises:
        WorkerError: The supervisor ended at once, or did not begin in time.
    """
    run.supervisor_log.parent.mkdir(parents=True, exist_ok=True)
    with run.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dnictl", "supervise", str(run.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | lease.hand_over(),
        )
    deadline = time.monotonic() + _DETACH_TIMEOUT_S
    while time.monotonic() < deadline:
        # It may have begun and ended between two looks.
        if RunState.read(run).pid == process.pid:
            process.returncode = 0  # it is on its own from now on: no ResourceWarning
            return process.pid
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.terminate()  # its workers would be on their own, known to nobody
    try:
        process.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    lease.release()
    lines = last_lines(run.supervisor_log)
    raise WorkerError("\n  | ".join(["the supervisor did not start", *lines]))


def last_lines(path: Path, count: int = 10) -> list[str]:
    """The last lines of a text file; none when it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 65536, 0))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def failure(run: RunDir, state: RunState) -> DniError | None:
    """What to tell about a run that ended badly; None when it did not."""
    name = state.failed
    if state.phase == "lost":
        return WorkerError(
            state.error or f"the supervisor of run {run.root.name!r} is gone",
            hint=f"dnictl resume {run.root}",
        )
    if state.phase != "failed":
        return None
    if name is None or name not in state.modules:
        return WorkerError(state.error or f"run {run.root.name!r} failed")
    module = state.modules[name]
    report = read_json(run.worker(name)) or {}
    lines = [how_it_ended(name, module)]
    if report.get("attempt") == module.attempt and report.get("error"):
        lines[0] += f": {report['error']}"
    lines.append(f"  log: {module.log}")
    lines += [f"  | {line}" for line in last_lines(Path(module.log))]
    lines.append("  The other modules were stopped; complete checkpoints are kept.")
    kind = DivergedError if module.exit_code == DivergedError.exit_code else WorkerError
    return kind("\n".join(lines), hint=f"dnictl resume {run.root}")
