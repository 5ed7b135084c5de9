"""Runs Slurm's commands and parses their output; no other module does.

Formats are those of sbatch(1), squeue(1), sacct(1), sinfo(1) and scontrol(1) of Slurm 22.05 and
later; JSON output is not used, because some sites build Slurm without it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dni_runtime.errors import UnavailableError, UsageError

_TIMEOUT_S = 60.0


class UncertainError(UnavailableError):
    """Slurm may have accepted a job: none of its files may be removed."""


@dataclass(frozen=True)
class JobInfo:
    state: str  # such as ``PENDING`` or ``TIMEOUT`` (squeue(1), "job state codes")
    reason: str = ""  # why it waits or ended
    nodes: str = ""  # in Slurm's notation

    @property
    def alive(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ALIVE

    @property
    def completing(self) -> bool:
        """Whether it is being ended, which a requeued job is, too, before it waits again."""
        return self.state == "COMPLETING"

    @property
    def pending(self) -> bool:
        """Whether it waits."""
        return self.state in _WAITING


_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ALIVE = {*_WAITING, "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
          "RESIZING"}  # fmt: skip


@dataclass(frozen=True)
class NodeShape:
    """A kind of node of a partition."""

    count: int  # of such nodes
    cpus: int
    memory_mib: int
    gpus: int
    partition: str = field(default="", compare=False)


class SilentError(UnavailableError):
    """One of Slurm's commands has not ended in time."""


def run_slurm(argv: Sequence[str], *, timeout_s: float = _TIMEOUT_S) -> tuple[int, str, str]:
    """Run one of Slurm's commands; return exit status, output and errors.

    Raises ``UnavailableError`` if it is not installed or does not respond.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise UnavailableError(
            f"{argv[0]!r} cannot be run: {error.strerror}",
            hint="run this where Slurm is installed: on a login node, not in a container",
        ) from None
    except subprocess.TimeoutExpired:
        raise SilentError(
            f"{argv[0]!r} did not respond within {timeout_s:.0f} s",
            hint="check Slurm's controller with 'scontrol ping'",
        ) from None
    return done.returncode, done.stdout, done.stderr


def submit(script: Path, options: Sequence[str] = (), *, former: str | None = None) -> str:
    """Submit a batch script, which belongs to one run only; return the job's id.

    The controller may have accepted a job although its answer came too late for sbatch
    (slurm.conf(5), MessageTimeout). So if sbatch fails, search for a job with this script first;
    ``former`` is an earlier one. Raises ``UncertainError`` if it is unknown whether Slurm has
    accepted the job.
    """
    try:
        code, out, err = run_slurm(["sbatch", "--parsable", *_options(script, options)])
    except SilentError as error:  # it may have asked already
        code, out, err = 1, "", error.message
    job = out.strip().partition(";")[0]  # JOB;CLUSTER
    if code == 0 and job.isdigit():
        return job
    try:
        code, listed, _ = run_slurm(["squeue", "--me", "--noheader", "--format=%A %o"])
    except SilentError:
        code, listed = 1, ""
    if code != 0:
        raise UncertainError(
            f"it is unknown whether Slurm has accepted the job: {(err or out).strip()}",
            hint=f"when 'squeue --me --format=\"%A %o\"' works, look for {str(script)!r}: cancel "
            "that job, or let it run; submit again only if it is not listed",
        )
    for line in listed.splitlines():
        job, _, command = line.strip().partition(" ")
        if command.strip() == str(script) and job != former:
            return job
    raise _refused(err or out)


def check_only(script: Path, options: Sequence[str] = ()) -> str:
    """Let Slurm check a batch script without submitting it; return its estimate of the start."""
    code, out, err = run_slurm(["sbatch", "--test-only", *_options(script, options)])
    if code != 0:
        raise _refused(err or out)
    return (err or out).strip().removeprefix("sbatch: ")


def _options(script: Path, further: Sequence[str]) -> list[str]:
    """Return sbatch's arguments for a script, with the script's own options before the others.

    Variables such as ``SBATCH_PARTITION`` override what a script says, but not arguments.
    """
    told: list[str] = []
    try:
        lines = script.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []  # sbatch says why
    for line in lines:
        if line.startswith("#SBATCH "):
            try:
                told += shlex.split(line.removeprefix("#SBATCH "), comments=True)
            except ValueError as error:
                raise UsageError(f"{str(script)!r}: {line!r} is no directive: {error}") from None
        elif line.strip() and not line.startswith("#"):  # sbatch reads no further
            break
    return [*told, *further, str(script)]


def _refused(said: str) -> UsageError:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines()]
    return UsageError(
        f"Slurm refuses the job: {'; '.join(line for line in lines if line) or 'no reason given'}",
        hint="check the script with --dry-run and the partitions with 'sinfo'",
    )


def _asked(argv: Sequence[str]) -> str:
    """Return the output of a command, which may fail if a job or step has ended or is about to."""
    code, out, err = run_slurm(argv)
    if code != 0 and "Invalid job id" not in err and "already completing" not in err:
        last = err.strip().splitlines()[-1:] or ["no reason given"]  # the final error
        raise UnavailableError(
            f"{argv[0]} failed: {last[0].removeprefix(f'{argv[0]}: ')}",
            hint="check Slurm's controller with 'scontrol ping'",
        )
    return out


def job_infos(jobs: Sequence[str]) -> dict[str, JobInfo]:
    """Return the states of the jobs that Slurm still knows.

    They are from squeue (the controller's memory), or else from sacct. Raises ``UnavailableError``
    if Slurm does not respond.
    """
    listed = f"--jobs={','.join(jobs)}"
    argv = ["squeue", "--noheader", "--states=all", listed, "--format=%A|%T|%r|%N"]
    infos = parse_jobs(_asked(argv))
    gone = [job for job in jobs if job not in infos]
    if not gone:
        return infos
    try:
        code, out, _ = run_slurm(
            ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(gone)}",
             "--format=JobIDRaw,State,Reason,NodeList"]
        )  # fmt: skip
    except UnavailableError:
        return infos
    return infos | parse_jobs(out) if code == 0 else infos


def parse_jobs(out: str) -> dict[str, JobInfo]:
    """Parse lines ``JOB|STATE|REASON|NODES`` of squeue or sacct; a job's last line counts."""
    infos = {}
    for line in out.splitlines():
        job, state, reason, nodes = (*line.strip().split("|"), "", "", "")[:4]
        if state:
            infos[job] = JobInfo(
                state.split()[0].rstrip("+"),  # "CANCELLED by 1000"
                "" if reason == "None" else reason,
                "" if nodes == "None assigned" else nodes,
            )
    return infos


def cancel(job: str) -> None:
    """Cancel a job; do nothing if it has ended."""
    run_slurm(["scancel", job])


def hostnames(nodelist: str) -> list[str]:
    """Return the names in a list of nodes such as ``n[1-3]``, exactly as Slurm prints them."""
    code, out, err = run_slurm(["scontrol", "show", "hostnames", nodelist])
    names = out.split()
    if code != 0 or not names:
        raise UnavailableError(f"the list of nodes {nodelist!r} cannot be expanded: {err.strip()}")
    return names


def own_job() -> str | None:
    """Return the id of the job that this process runs in, or None."""
    return os.environ.get("SLURM_JOB_ID")


def step_ids(job: str) -> dict[str, str]:
    """Return the ids (``JOB.STEP``) of a job's running steps by name, the newest of each."""
    argv = ["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j"]
    return parse_steps(_asked(argv))


def parse_steps(out: str) -> dict[str, str]:
    """Return the numbered steps in ``squeue --steps --format=%i|%j``, by name."""
    steps = []
    for line in out.splitlines():
        step, _, label = line.strip().partition("|")
        number = step.rpartition(".")[2]
        if number.isdigit():
            steps.append((int(number), label, step))
    return {label: step for _, label, step in sorted(steps)}


def kill_steps(steps: Sequence[str]) -> None:
    """Kill all processes of steps; ignore steps that have ended."""
    if steps:
        _asked(["scancel", "--signal=KILL", *steps])


def node_shapes(partition: str | None) -> list[NodeShape]:
    """Return the kinds of nodes in partitions, listed with commas (None: the default one)."""
    argv = ["sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%G"]
    return parse_sinfo(_asked(argv), partition)


def parse_sinfo(out: str, partition: str | None) -> list[NodeShape]:
    """Return the nodes of partitions in ``sinfo --format=%P|%D|%c|%m|%G``."""
    wanted = [] if partition is None else partition.split(",")
    names, shapes = set(), []
    for line in out.splitlines():
        name, count, cpus, memory, gres = (*line.strip().split("|"), "", "", "", "")[:5]
        default, name = name.endswith("*"), name.rstrip("*")
        names.add(name)
        if name in wanted or (partition is None and default):
            gpus = sum(int(n) for n in re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", gres))
            shapes.append(NodeShape(_number(count), _number(cpus), _number(memory), gpus, name))
    if unknown := [name for name in wanted if name not in names]:
        raise UsageError(
            f"this Slurm has no partition {unknown[0]!r}",
            hint=f"partitions: {', '.join(sorted(names))}",
        )
    return shapes


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
