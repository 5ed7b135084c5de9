"""Site profiles: a cluster's own settings, one file for each cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dni_runtime.spec.named import ABSOLUTE, Frozen, matching

Word = Annotated[
    str,
    matching(
        r"^[^\s'\"\\$`]{1,128}$", "one word without spaces, quotes, dollar signs, backslashes"
    ),
]
"""One word of an ``#SBATCH`` directive."""

Limit = Annotated[
    str,
    matching(
        r"^(\d+(-\d+)?(:\d+){0,2}|(?i:unlimited|infinite))$",
        "a time limit of Slurm's, as 4:00:00, 1-12:00:00 (a day and a half) or '30' (minutes)",
    ),
]

ProfileLine = Annotated[str, matching(r"^[^\n\r\x00]{1,1024}$", "one line of at most 1024 letters")]


class ProfileSpec(Frozen):
    """Settings for submitting jobs to one cluster."""

    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None  # required node features
    reservation: Word | None = None
    time: Limit | None = None
    # Further ``#SBATCH`` directives, such as ``--mail-type=FAIL``.
    directives: tuple[
        Annotated[str, matching(r"^--[a-z][^\n\r\x00]*$", "an option as '--mail-type=FAIL'")], ...
    ] = ()
    # Directives to leave out, such as ``mem`` if a site refuses ``--mem``.
    suppress: tuple[
        Annotated[str, matching(r"^[a-z][a-z-]*$", "a directive's name without dashes")], ...
    ] = ()
    # Shell lines before the workers start, such as ``module load apptainer``.
    prologue: tuple[ProfileLine, ...] = ()
    # Slurm option that requests GPUs.
    gpu_request: Literal["gres", "gpus-per-task", "gpus-per-node"] = "gres"
    # As in ``--gres=gpu:TYPE:N``.
    gpu_type: Annotated[str, matching(r"^[A-Za-z0-9_.-]+$", "a type as 'a100'")] | None = None
    # Network interface, or network as ``10.0.0.0/24``, of links between nodes.
    interface: Word | None = None
    # Folder on each node's own disk, for temporary files; the shell of the batch script expands
    # variables in it, on the job's first node.
    scratch: (
        Annotated[
            str,
            matching(
                r"^[/$][^\s'\"\\`:,]*$", "a path from '/' or a variable, without spaces, quotes"
            ),
        ]
        | None
    ) = None
    # folders in containers at the same path; ``PATH:ro``: read-only
    binds: tuple[Annotated[ProfileLine, ABSOLUTE], ...] = ()
    container_args: tuple[ProfileLine, ...] = ()  # of ``apptainer run``
    python: ProfileLine | None = None  # with dnictl, on the nodes; None: the submitting one
    # How often a job that ran out of time or was preempted resumes automatically.
    max_requeues: Annotated[int, Field(ge=0, le=10_000)] = 10

    @field_validator("prologue", mode="before")
    @classmethod
    def _lines(cls, value: object) -> object:
        return tuple(value.splitlines()) if isinstance(value, str) else value
