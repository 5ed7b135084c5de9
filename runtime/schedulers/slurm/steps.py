"""The steps of a job, as argument lists (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from dni_runtime.plan.plan import Need, WorkerPlan
from dni_runtime.schedulers.runtimes import on_node
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
