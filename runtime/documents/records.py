"""What a run was started as (``run.json``), and as which Slurm job (``job.json``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dni_runtime.documents.base import Document
from dni_runtime.spec.profile import ProfileSpec

FORMAT = 1
"""The format of run directories."""


class Versions(Document):
    """What created a run.

    Attributes:
        dni_runtime: The version of this package.
        python: Python's.
        protocol: The links' protocol.
        checkpoint: The format of the first checkpoints; None if an earlier version created it.
    """

    dni_runtime: str = "unknown"
    python: str = ""
    protocol: int = 0
    checkpoint: int | None = None


class Made(Document):
    """What is read first of ``run.json``, whatever version created the run.

    Attributes:
        format: The format of the run directory.
        versions: What created it.
    """

    format: int = FORMAT
    versions: Versions = Versions()


class RunRecord(Made):
    """The content of ``run.json``.

    Attributes:
        name: The run's name (``run``).
        chain: The chain's name.
        modules: The workers, head first: the modules, and several for those with replicas.
        backend: Backend of the workers.
        scheduler: What starts the workers (``launch/schedulers.py``).
        hosts: Their hosts, if the user named them.
        created: Unix time of its creation.
        chain_file: The chain file that it was started from.
        data: Folder or file of the head's data, or None.
        carried: The run whose state it goes on with, or None.
        images: Image of each module, for containers.
        epochs: Epochs requested.
        batches_per_epoch: Training batches in one epoch, if known.
        total_steps: Training batches in the whole run, if known.
        user: Who created it.
        host: On which host.
    """

    name: str = Field(alias="run")
    chain: str
    modules: tuple[str, ...]
    backend: str
    scheduler: str = "local"
    hosts: tuple[str, ...] = ()
    created: float
    chain_file: Path
    data: Path | None = None
    carried: Path | None = None
    images: dict[str, Path] = Field(default_factory=dict)
    epochs: int
    batches_per_epoch: int | None = None
    total_steps: int | None = None
    user: str = ""
    host: str = ""


class Planned(Document):
    """What commands read of the launch plan, ``plan.json``, of this version or another one.

    Attributes:
        stop_grace_s: Seconds that workers have to stop.
    """

    stop_grace_s: float = 30.0


class JobRecord(Document):
    """The content of ``job.json``.

    Attributes:
        format: The format of the file.
        job: The job's id, or None before its submission.
        nodes: The node of each module, head first, from 0.
        profile: Name of the site profile, or None.
        settings: Content of the profile when the run was created.
        log_level: Log level of the workers.
        submitted: Unix time of the submission.
    """

    format: Literal[1] = 1
    job: str | None = None
    nodes: tuple[int, ...]
    profile: str | None = None
    settings: ProfileSpec = ProfileSpec()
    log_level: str = "info"
    submitted: float = 0.0
