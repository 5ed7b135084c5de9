"""The batch script of a job, as a text (pure)."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from dni_runtime import __version__
from dni_runtime.errors import UsageError
from dni_runtime.plan.plan import Need, WorkerPlan
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.slurm.steps import gpu_directive, srun_argv, step_args
from dni_runtime.spec.profile import ProfileSpec

_LEAVE_S = 30
"""Seconds beyond the chain's ``stop_grace_s``, for the supervisor and a requeue of the job."""

NO_KILL = "--no-kill"
"""The job continues when a node fails; the supervisor moves its modules (sbatch(1))."""


@dataclass(frozen=True)
class JobRequest:
    run: Path  # the directory
    chain: str  # its name
    needs: tuple[Need, ...]  # of the modules, head first
    nodes: tuple[int, ...]  # of each module, from 0
    stop_grace_s: float  # that workers have to stop
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    python: str = "python3"  # the one with dnictl on the nodes
    python_path: str = ""  # its ``PYTHONPATH``, or empty

    @property
    def count(self) -> int:
        """Number of nodes."""
        return max(self.nodes) + 1

    def on(self, node: int) -> list[Need]:
        return [need for need, at in zip(self.needs, self.nodes, strict=True) if at == node]

    def largest(self, what: str) -> int:
        """Return the largest need of a node for ``cpus``, ``gpus`` or ``memory_mib``."""
        nodes = map(self.on, range(self.count))
        return max(sum(int(getattr(need, what)) for need in there) for there in nodes)

    @property
    def idle_gpus(self) -> int:
        """GPUs that the job has and no module uses, since all its nodes are alike."""
        return self.largest("gpus") * self.count - sum(need.gpus for need in self.needs)

    @property
    def grace_s(self) -> int:
        """Seconds between the signal to stop and the job's time limit."""
        return math.ceil(self.stop_grace_s) + _LEAVE_S


def directives(request: JobRequest) -> list[str]:
    """Return the job's ``#SBATCH`` directives, without those that the profile suppresses.

    Every node requests what the fullest one needs: all nodes of a job are alike.
    """
    profile = request.profile
    log = str(RunDir(request.run).supervisor_log)
    if any(c in log for c in '\n\r"\\'):
        raise UsageError(
            f"the run directory {str(request.run)!r} is not usable in a batch script",
            hint="choose one without quotes, backslashes and line breaks: --runs or --run-dir",
        )
    if profile.time is not None and _seconds(profile.time) <= request.grace_s:
        raise UsageError(
            f"a time limit of {profile.time!r} leaves no time to train: the modules are told to "
            f"stop {request.grace_s} s before it",
            hint="1:00:00 is an hour, 1:00 a minute; or lower 'stop_grace_s'",
        )
    options = {
        "job-name": re.sub(r"[^\w.-]", "_", request.run.name),
        "account": profile.account,
        "partition": profile.partition,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "reservation": profile.reservation,
        "time": profile.time,
        "nodes": str(request.count),
        "ntasks-per-node": "1",
        "cpus-per-task": str(request.largest("cpus")),
        "mem": f"{request.largest('memory_mib')}M",
    }
    gpus = request.largest("gpus")
    lines = [
        *(f"--{name}={value}" for name, value in options.items() if value is not None),
        *([gpu_directive(profile, gpus)] if gpus else []),
        *([NO_KILL] if request.count > 1 else []),
        "--requeue",
        "--open-mode=append",  # a requeued job continues its log
        # %: sbatch's own patterns
        f'--output="{log.replace("%", "%%")}"',
        # to the batch shell only: the supervisor signals the workers
        f"--signal=B:TERM@{request.grace_s}",
        *profile.directives,
    ]
    return [line for line in lines if _name(line) not in profile.suppress]


def _seconds(limit: str) -> float:
    """Return a time limit of Slurm's in seconds; it rounds to whole minutes, and 0 is none."""
    days, dash, rest = limit.rpartition("-")
    if not rest.replace(":", "").isdigit():
        return math.inf
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]  # minutes come first
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    whole = (int(days or 0) * 24 + hours) * 60 + minutes + math.ceil(seconds / 60)
    return whole * 60 or math.inf


def _name(directive: str) -> str:
    return directive.removeprefix("--").partition("=")[0].partition(" ")[0]


def step_outline(need: Need, request: JobRequest) -> str:
    """Return a step's command for display, without the worker's command."""
    options = step_args(need, profile=request.profile, any_gpus=bool(request.largest("gpus")))
    worker = WorkerPlan(module=need.module, node="NODE", need=need)
    return shlex.join([*srun_argv(replace(worker, scheduler_args=options)), "WORKER"])


def placement_lines(request: JobRequest) -> list[str]:
    """Return one line per node."""
    lines = []
    for node in range(request.count):
        there = request.on(node)
        names = ", ".join(need.module for need in there)
        gpus = sum(need.gpus for need in there)
        lines.append(
            f"node {node}: {names} ({sum(need.cpus for need in there)} CPUs, "
            f"{sum(need.memory_mib for need in there)} MiB" + (f", {gpus} GPUs)" if gpus else ")")
        )
    return lines


def render_script(request: JobRequest) -> str:
    template = (files("dni_runtime.definitions") / "batch.sbatch.j2").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["shell"] = shlex.quote
    lines = directives(request)
    return environment.from_string(template).render(
        directives=lines,
        watched=NO_KILL in lines,
        any_gpus=bool(request.largest("gpus")),
        name=request.run.name,
        chain=request.chain,
        version=__version__,
        placement=placement_lines(request),
        step=step_outline(request.needs[0], request),
        prologue=request.profile.prologue,
        run=str(request.run),
        python_path=request.python_path,
        scratch=request.profile.scratch,
        grace_s=request.grace_s,
        python=request.python,
        max_requeues=request.profile.max_requeues,
    )
