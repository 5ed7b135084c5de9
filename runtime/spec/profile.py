"""Site profiles: a cluster's own settings, one file for each cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from dni_runtime.spec.named import Frozen

Word = Annotated[str, StringConstraints(pattern=r"^[^\s'\"\\$`]{1,128}$")]
"""One word of an ``#SBATCH`` directive."""

Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]{1,1024}$")]


class ProfileSpec(Frozen):
    """Settings for submitting jobs to one cluster."""

    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None  # required node features
    reservation: Word | None = None
    time: Word | None = None
    # Further ``#SBATCH`` directives, such as ``--mail-type=FAIL``.
    directives: tuple[Annotated[str, StringConstraints(pattern=r"^--[a-z][^\n\r\x00]*$")], ...] = ()
    # Directives to leave out, such as ``mem`` if a site refuses ``--mem``.
    suppress: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")], ...] = ()
    # Shell lines before the workers start, such as ``module load apptainer``.
    prologue: tuple[Line, ...] = ()
    # Slurm option that requests GPUs.
    gpu_request: Literal["gres", "gpus-per-task", "gpus-per-node"] = "gres"
    # As in ``--gres=gpu:TYPE:N``.
    gpu_type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    # Network interface, or network as ``10.0.0.0/24``, of links between nodes.
    interface: Word | None = None
    # Folder on each node's own disk, for temporary files; the shell of the batch script expands
    # variables in it, on the job's first node.
    scratch: Annotated[str, StringConstraints(pattern=r"^[/$][^\s'\"\\`:,]*$")] | None = None
    binds: tuple[Line, ...] = ()  # folders in containers at the same path; ``PATH:ro``: read-only
    container_args: tuple[Line, ...] = ()  # of ``apptainer run``
    python: Line | None = None  # with dnictl, on the nodes; None: the submitting one
    # How often a job that ran out of time or was preempted resumes automatically.
    max_requeues: Annotated[int, Field(ge=0, le=10_000)] = 10

    @field_validator("prologue", mode="before")
    @classmethod
    def _lines(cls, value: object) -> object:
        return tuple(value.splitlines()) if isinstance(value, str) else value

    @field_validator("binds")
    @classmethod
    def _absolute(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not path.startswith("/"):
                raise ValueError(f"{path!r} is not an absolute path")
        return value
