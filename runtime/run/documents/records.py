"""What a run was started as (``run.json``), and as which Slurm job (``job.json``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dni_runtime.run.documents.base import Document
from dni_runtime.spec.edge import Preprocessing
from dni_runtime.spec.named import RunName, WorkerName
from dni_runtime.spec.profile import ProfileSpec

FORMAT = 1
"""The format of run directories."""


class Versions(Document):
    """What created a run."""

    dni_runtime: str = "unknown"
    python: str = ""
    protocol: int = 0  # of the links
    checkpoint: int = 0  # format of its checkpoints


class RunHeader(Document):
    """What is read first of ``run.json``, whatever version created the run."""

    format: int = FORMAT  # of the run directory
    versions: Versions = Versions()


class RunRecord(RunHeader):
    """The content of ``run.json``."""

    name: RunName = Field(alias="run")
    chain: str  # the chain's name
    modules: tuple[WorkerName, ...]  # the workers, head first: several for a module with replicas
    backend: str
    scheduler: str = "local"  # what starts the workers (``schedulers/schedulers.py``)
    hosts: tuple[str, ...] = ()  # if the user named them
    created: float  # Unix time
    chain_file: Path  # that it was started from
    data: Path | None = None  # folder or file of the head's data
    carried: Path | None = None  # the run whose state it goes on with
    release: str | None = None  # NAME:VERSION, if it is one: it does not change
    serves: Path | None = None  # the run whose network it serves; None: it trains
    images: dict[str, Path] = Field(default_factory=dict)  # by module, for containers
    preprocessing: Preprocessing | None = None  # of its data; None: not known
    epochs: int  # requested
    batches_per_epoch: int | None = None  # training batches; None: not known
    total_steps: int | None = None  # the same, in the whole run
    user: str = ""  # who created it
    host: str = ""  # on which host


class PlanHeader(Document):
    """What commands read of the launch plan, ``plan.json``, of this version or another one."""

    stop_grace_s: float = 30.0  # that workers have to stop


class JobRecord(Document):
    """The content of ``job.json``."""

    format: Literal[1] = 1
    job: str | None = None  # the job's id; None: not submitted yet
    nodes: tuple[int, ...]  # of each module, head first, from 0
    profile: str | None = None  # name of the site profile
    settings: ProfileSpec = ProfileSpec()  # content of the profile when the run was created
    log_level: str = "info"  # of the workers
    submitted: float = 0.0  # Unix time
    after: int = 0  # the run's newest attempt when the job was submitted
