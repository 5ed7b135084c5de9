"""The batch script and the steps of a job (pure: texts and argument lists)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from dni_runtime import __version__
from dni_runtime.errors import UsageError
from dni_runtime.launch.slurm.placement import Need
from dni_runtime.rundir import RunDir
from dni_runtime.spec.profile import ProfileSpec

DEFAULT_MEMORY_MIB = 2048
"""What a module's worker gets that says nothing: torch alone takes some hundred MiB."""

_LEAVE_S = 30
"""On top of the chain's ``stop_grace_s``: for the supervisor, and for the job to be requeued."""

NO_KILL = "--no-kill"
"""The job goes on when a node fails, and the supervisor moves what was there (sbatch(1))."""

# The worker's folders on its node, made by a shell because the node may be another one than the
# supervisor's. Sockets lie in a folder that nobody else can have made or can enter; scratch may be
# one that the site has made for all.
_STEP = (
    "umask 077; sockets=$1; scratch=$2; shift 2; foreign() { "
    'echo "the folder $1 cannot be made, or belongs to another user" >&2; exit 69; }; '
    'mkdir -p -- "$sockets" && [ -O "$sockets" ] && [ ! -L "$sockets" ] && chmod 700 "$sockets" || '
    'foreign "$sockets"; '
    '[ -z "$scratch" ] || { mkdir -p -- "$scratch" && case $(stat -L -c %u -- "$scratch") in '
    '0|$(id -u)) ;; *) false ;; esac; } || foreign "$scratch"; exec "$@"'
)


@dataclass(frozen=True)
class JobRequest:
    """What a job is made of.

    Attributes:
        run: The run directory.
        chain: The chain's name.
        needs: The modules, head first.
        nodes: The node of each module, from 0.
        stop_grace_s: Seconds that a worker told to stop has.
        profile: The site's.
        python: The Python with dnictl on the nodes.
        python_path: Its ``PYTHONPATH``, or an empty text.
        time: Time limit, or None for the profile's.
        partition: Partition, or None for the profile's.
        partitions: The partition of each node where modules ask for different ones (None: the
            cluster's default); nodes of one partition follow each other. Empty: one for all.
        extra: Further directives from the command line.
    """

    run: Path
    chain: str
    needs: tuple[Need, ...]
    nodes: tuple[int, ...]
    stop_grace_s: float
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    python: str = "python3"
    python_path: str = ""
    time: str | None = None
    partition: str | None = None
    partitions: tuple[str | None, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many nodes."""
        return max(self.nodes) + 1

    def on(self, node: int) -> list[Need]:
        """The modules on a node."""
        return [need for need, at in zip(self.needs, self.nodes, strict=True) if at == node]

    @property
    def components(self) -> dict[str | None, list[int]]:
        """The nodes in each partition: a component of a heterogeneous job where there are several.

        The batch script runs on the first one's first node.
        """
        found: dict[str | None, list[int]] = {}
        everywhere = (self.partition or self.profile.partition,) * self.count
        for node, partition in enumerate(self.partitions or everywhere):
            found.setdefault(partition, []).append(node)
        return found

    def largest(self, what: str, nodes: Sequence[int] | None = None) -> int:
        """The most of ``cpus``, ``gpus`` or ``memory_mib`` that any of some nodes must have."""
        nodes = range(self.count) if nodes is None else nodes
        return max(sum(int(getattr(need, what)) for need in self.on(node)) for node in nodes)

    @property
    def grace_s(self) -> int:
        """Seconds before the time limit at which the job is told to end."""
        return math.ceil(self.stop_grace_s) + _LEAVE_S


def gpu_directive(profile: ProfileSpec, gpus: int) -> str:
    """How this site wants to be asked for GPUs."""
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpu_request == "gres":
        return f"--gres=gpu:{kind}{gpus}"
    return f"--{profile.gpu_request}={kind}{gpus}"


def directives(request: JobRequest) -> list[str]:
    """The job's ``#SBATCH`` directives, without those that the profile suppresses.

    Every node gets what the fullest one of its partition needs: Slurm has no other way within one
    component of a job. Components are parted by ``hetjob`` (sbatch(1), "heterogeneous jobs").
    """
    profile = request.profile
    log = str(RunDir(request.run).supervisor_log)
    if any(c in log for c in '\n\r"\\'):
        raise UsageError(
            f"the run directory {str(request.run)!r} cannot stand in a batch script",
            hint="name one without quotes, backslashes and line breaks with --runs or --run-dir",
        )
    first, *others = (
        _component(request, partition, nodes) for partition, nodes in request.components.items()
    )
    lines = [
        f"--job-name=dni-{request.chain}",
        *first,
        # modules are not moved between the components of a heterogeneous job
        *([NO_KILL] if request.count > 1 and not others else []),
        "--requeue",
        "--open-mode=append",  # a requeued job's log goes on
        # %: sbatch's own patterns
        f'--output="{log.replace("%", "%%")}"',
        # to the batch shell alone: the supervisor tells the workers
        f"--signal=B:TERM@{request.grace_s}",
        *profile.directives,
        *request.extra,
    ]
    for component in others:
        lines += ["hetjob", *component, *profile.directives, *request.extra]
    return [line for line in lines if _name(line) not in profile.suppress]


def _component(request: JobRequest, partition: str | None, nodes: Sequence[int]) -> list[str]:
    """The directives that each component of a job says for itself."""
    profile = request.profile
    given = {
        "account": profile.account,
        "partition": partition,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "reservation": profile.reservation,
        "time": request.time or profile.time,
        "nodes": str(len(nodes)),
        "ntasks-per-node": "1",
        "cpus-per-task": str(request.largest("cpus", nodes)),
        "mem": f"{request.largest('memory_mib', nodes)}M",
    }
    lines = [f"--{name}={value}" for name, value in given.items() if value is not None]
    gpus = request.largest("gpus", nodes)
    return [*lines, gpu_directive(profile, gpus)] if gpus else lines


def _name(directive: str) -> str:
    return directive.removeprefix("--").partition("=")[0].partition(" ")[0]


def step_argv(
    need: Need,
    node: str,
    argv: Sequence[str],
    *,
    profile: ProfileSpec,
    sockets: Path,
    scratch: str = "",
    any_gpus: bool = False,
    group: int | None = None,
) -> list[str]:
    """The command that runs one module's worker as a step of the job.

    Args:
        need: The module and its resources.
        node: The node's name, as Slurm prints it.
        argv: The worker's command.
        profile: The site's.
        sockets: Folder of the run's ipc sockets, on the node.
        scratch: Folder for temporary files on the node, or an empty text.
        any_gpus: Whether any module of the chain has GPUs.
        group: The node's component of a heterogeneous job, or None.
    """
    options = [
        f"--job-name={need.module}",  # by which the step is found again
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        *group_option(group),
        # Without --exact a step takes all CPUs of its node, without --mem all memory, and the next
        # step waits. --cpus-per-task: not inherited from the job since Slurm 22.05.
        "--exact",
        f"--cpus-per-task={need.cpus}",
        f"--mem={need.memory_mib}M",
        "--input=none",
        "--export=ALL",  # what the site's prologue has set
    ]
    if any_gpus:
        options.append(gpu_directive(profile, need.gpus) if need.gpus else "--gres=none")
    shell = ["/bin/sh", "-c", _STEP, "dni-step", str(sockets), scratch]
    return ["srun", *options, *shell, *argv]


def group_option(group: int | None) -> list[str]:
    """What ``srun`` must be told in a heterogeneous job; without it, it knows component 0 alone."""
    return [] if group is None else [f"--het-group={group}"]


def step_outline(need: Need, request: JobRequest) -> str:
    """A step's command for people: without what the worker is given."""
    argv = step_argv(
        need,
        "NODE",
        (),
        profile=request.profile,
        sockets=Path(),
        any_gpus=bool(request.largest("gpus")),
        group=0 if request.partitions else None,
    )
    return shlex.join([*argv[: argv.index("/bin/sh")], "WORKER"])


def placement_lines(request: JobRequest) -> list[str]:
    """One line on each node."""
    lines = []
    for node in range(request.count):
        there = request.on(node)
        where = f" in {request.partitions[node] or 'default'}" if request.partitions else ""
        names = ", ".join(need.module for need in there)
        gpus = sum(need.gpus for need in there)
        lines.append(
            f"node {node}{where}: {names} ({sum(need.cpus for need in there)} CPUs, "
            f"{sum(need.memory_mib for need in there)} MiB" + (f", {gpus} GPUs)" if gpus else ")")
        )
    return lines


def render_script(request: JobRequest) -> str:
    """The batch script.

    Raises:
        UsageError: The run directory's path cannot stand in it.
    """
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


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of ``srun`` without what the job's own request left there for it.

    Steps say themselves what they want; srun(1), "INPUT ENVIRONMENT VARIABLES".
    """
    dropped = ("SLURM_GPUS", "SLURM_GRES", "SLURM_MEM_", "SLURM_CPUS_PER_", "SLURM_NTASKS",
               "SLURM_TRES_PER_", "SLURM_TASKS_PER_", "SLURM_NPROCS", "SLURM_DISTRIBUTION",
               "SLURM_EXACT", "SLURM_OVERLAP", "SLURM_EXCLUSIVE", "SLURM_TIMELIMIT",
               "SLURM_JOB_NAME", "SRUN_", "SBATCH_")  # fmt: skip
    return {name: value for name, value in environ.items() if not name.startswith(dropped)}
