"""Site profiles: a cluster's own settings, one file for each cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from dni_runtime.spec.named import Frozen

Word = Annotated[str, StringConstraints(pattern=r"^[^\s'\"\\$`]{1,128}$")]
"""One word of an ``#SBATCH`` directive."""

Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]{1,1024}$")]


class ProfileSpec(Frozen):
    """Settings for submitting jobs to one cluster.

    Attributes:
        account: Account that is charged (``--account``).
        partition: Default partition (``--partition``).
        qos: Quality of service (``--qos``).
        constraint: Required node features (``--constraint``).
        reservation: Reservation to run in (``--reservation``).
        time: Default time limit (``--time``).
        directives: Further ``#SBATCH`` directives, such as ``--mail-type=FAIL``.
        suppress: Directives to leave out, such as ``mem`` if a site refuses ``--mem``.
        prologue: Shell lines before the workers start, such as ``module load apptainer``.
        gpu_request: Slurm option that requests GPUs.
        gpu_type: Type of the GPUs (``--gres=gpu:TYPE:N``).
        interface: Network interface, or network as ``10.0.0.0/24``, of links between nodes.
        scratch: Folder on each node's own disk, for temporary files; the shell of the batch script
            expands variables in it, on the job's first node.
        binds: Folders mounted into containers at the same path; ``PATH:ro`` for read-only.
        container_args: Further arguments of ``apptainer run``.
        python: Python with dnictl on the nodes (default: the submitting one).
        max_requeues: How often a job that ran out of time or was preempted resumes automatically.
    """

    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    time: Word | None = None
    directives: tuple[Annotated[str, StringConstraints(pattern=r"^--[a-z][^\n\r\x00]*$")], ...] = ()
    suppress: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")], ...] = ()
    prologue: tuple[Line, ...] = ()
    gpu_request: Literal["gres", "gpus-per-task", "gpus-per-node"] = "gres"
    gpu_type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    interface: Word | None = None
    scratch: Annotated[str, StringConstraints(pattern=r"^[/$][^\s'\"\\`:,]*$")] | None = None
    binds: tuple[Line, ...] = ()
    container_args: tuple[Line, ...] = ()
    python: Line | None = None
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
