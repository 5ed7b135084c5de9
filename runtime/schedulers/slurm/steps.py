"""The steps of a job, as argument lists and as processes of this host."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping

from dni_runtime.errors import UnavailableError
from dni_runtime.plan.plan import Need, WorkerPlan
from dni_runtime.run.documents.state import ModuleState, lives
from dni_runtime.schedulers.processes import LocalStarter, Process
from dni_runtime.schedulers.runtimes import on_node
from dni_runtime.schedulers.slurm import commands
from dni_runtime.spec.profile import ProfileSpec


def gpu_directive(profile: ProfileSpec, gpus: int) -> str:
    """Return the site's option to request GPUs."""
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpu_request == "gres":
        return f"--gres=gpu:{kind}{gpus}"
    return f"--{profile.gpu_request}={kind}{gpus}"


def step_args(need: Need, *, profile: ProfileSpec, any_gpus: bool) -> tuple[str, ...]:
    """Return those options of a module's step that depend on the job.

    ``any_gpus``: any module of the chain has GPUs.
    """
    if not any_gpus:
        return ()
    return (gpu_directive(profile, need.gpus) if need.gpus else "--gres=none",)


def step_argv(worker: WorkerPlan) -> list[str]:
    """Return the command that runs a worker as a step of the job."""
    return [*srun_argv(worker), *on_node(worker)]


def srun_argv(worker: WorkerPlan) -> list[str]:
    """Return the part of :func:`step_argv` that is Slurm's."""
    assert worker.need is not None
    # Without --exact a step takes all CPUs of its node, without --mem all memory, and the next
    # step waits. --cpus-per-task is not inherited from the job since Slurm 22.05.
    cpus = ["--exact", f"--cpus-per-task={worker.need.cpus}"]
    if worker.overlaps:  # Slurm 22.05 starts no step that asks for CPUs in a resized job
        cpus = ["--overlap"]
    return [
        "srun",
        f"--job-name={worker.module}",  # used to find the step
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={worker.node}",
        *cpus,
        f"--mem={worker.need.memory_mib}M",
        "--input=none",
        "--export=ALL",  # variables set by the site's prologue
        *worker.scheduler_args,
    ]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ``srun`` without the job's own request.

    Steps have their own options; srun(1), "INPUT ENVIRONMENT VARIABLES".
    """
    dropped = ("SLURM_GPUS", "SLURM_GRES", "SLURM_MEM_", "SLURM_CPUS_PER_", "SLURM_NTASKS",
               "SLURM_TRES_PER_", "SLURM_TASKS_PER_", "SLURM_NPROCS", "SLURM_DISTRIBUTION",
               "SLURM_EXACT", "SLURM_OVERLAP", "SLURM_EXCLUSIVE", "SLURM_TIMELIMIT",
               "SLURM_JOB_NAME", "SLURM_CPU_BIND", "SLURM_HINT", "SLURM_CONSTRAINT",
               "SLURM_THREADS_PER_CORE", "SRUN_", "SBATCH_")  # fmt: skip
    return {name: value for name, value in environ.items() if not name.startswith(dropped)}


_END_S = 30.0

_log = logging.getLogger(__name__)


class StepProcess:
    """The ``srun`` of a worker's step; the starter kills the step itself.

    ``end_step`` ends the step, which outlives an ``srun`` that was killed.
    """

    def __init__(self, srun: Process, end_step: Callable[[], None]) -> None:
        self._srun = srun
        self._end_step: Callable[[], None] | None = end_step

    @property
    def pid(self) -> int:
        return self._srun.pid

    def poll(self) -> int | None:
        code = self._srun.poll()
        if code is not None and code < 0 and self._end_step is not None:
            self._end_step()  # it would run on, and hold the resources that a restart needs
            self._end_step = None
        return code

    def kill(self) -> None:
        self._end_step = None  # who kills it ends its step
        self._srun.kill()


class SlurmStarter:
    """Starts workers by ``srun``; a plan's own variables extend ``environ``."""

    def __init__(self, job: str, environ: Mapping[str, str] | None = None) -> None:
        self._job = job
        environ = step_environment(os.environ if environ is None else environ)
        self._local = LocalStarter(environ, render=step_argv)

    def start(self, worker: WorkerPlan) -> StepProcess:
        return self._step(self._local.start(worker), worker.module)

    def adopt(self, worker: WorkerPlan, module: ModuleState) -> StepProcess:
        if not lives(module):  # a newer step may have been started but not recorded
            end_steps(self._job, [worker.module])
        return self._step(self._local.adopt(worker, module), worker.module)

    def _step(self, srun: Process, module: str) -> StepProcess:
        return StepProcess(srun, lambda: end_steps(self._job, [module]))

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        try:  # all steps at once: each of Slurm's commands takes a tenth of a second or more
            steps = commands.step_ids(self._job)
            commands.kill_steps([steps[name] for name in workers if name in steps])
        except UnavailableError as error:
            _log.warning("the steps of %s were not killed: %s", ", ".join(workers), error)
        for process in workers.values():
            process.kill()

    def gone(self, modules: Collection[str]) -> Collection[str]:
        """Return modules without a step: an ``srun`` that was cut off may wait for ever."""
        try:
            steps = commands.step_ids(self._job)
        except UnavailableError:
            return ()
        return [module for module in modules if module not in steps]


def end_steps(job: str, modules: Collection[str]) -> None:
    """Kill the steps of these modules that still run, although what started them was killed."""
    until = time.monotonic() + _END_S
    try:
        while time.monotonic() < until:
            running = [step for name, step in commands.step_ids(job).items() if name in modules]
            if not running:
                return
            commands.kill_steps(running)
            time.sleep(1)
    except UnavailableError as error:
        _log.warning("this job's running steps are unknown: %s", error)
