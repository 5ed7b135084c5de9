"""A run's Slurm job: its request (``job.json``) and its state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from dni_runtime.errors import DataError, UnavailableError
from dni_runtime.launch.slurm.commands import JobInfo, job_infos
from dni_runtime.launch.state import RunState
from dni_runtime.rundir import RunDir, read_json, write_json, written_lately
from dni_runtime.spec.profile import ProfileSpec

_FRESH_S = 25.0
"""Age up to which a state is current: the heartbeat of 10 s plus file system caches."""


@dataclass(frozen=True)
class JobRecord:
    """The content of ``job.json``.

    Attributes:
        job: The job's id, or None before its submission.
        nodes: The node of each module, head first, from 0.
        profile: Name of the site profile, or None.
        settings: Content of the profile when the run was created.
        log_level: Log level of the workers.
        submitted: Unix time of the submission.
    """

    job: str | None
    nodes: tuple[int, ...]
    profile: str | None
    settings: dict[str, Any]
    log_level: str
    submitted: float

    def write(self, run: RunDir) -> None:
        """Write the record to the run directory."""
        write_json(run.job, {"format": 1, **asdict(self)})

    def with_job(self, job: str) -> JobRecord:
        """Return the record with another job."""
        return replace(self, job=job, submitted=time.time())

    @property
    def site(self) -> ProfileSpec:
        """The site profile."""
        return ProfileSpec.model_validate(self.settings)

    @classmethod
    def read(cls, run: RunDir) -> JobRecord | None:
        """Return the record of a run's job; None if the run has none.

        Raises:
            DataError: It was not written by this program.
        """
        document = read_json(run.job)
        if document is None:
            return None
        try:
            document.pop("format")
            record = cls(**{**document, "nodes": tuple(document["nodes"])})
            ProfileSpec.model_validate(record.settings)
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise DataError(f"{str(run.job)!r} is not a valid job record: {error}") from None
        return record


def describe(runs: Sequence[RunDir], states: Sequence[RunState]) -> list[RunState]:
    """Complete the states of runs by one query to Slurm: a run's own state is out of date before
    its start, between two starts, and after its job was ended from outside.
    """
    jobs = [_job_to_ask_for(run, state) for run, state in zip(runs, states, strict=True)]
    asked = sorted({job for job in jobs if job is not None})
    try:
        infos = job_infos(asked) if asked else {}
    except UnavailableError:
        return list(states)
    return [
        state
        if job is None
        else judge(state, job, infos.get(job), told_to_stop=run.stop_request.exists())
        for run, state, job in zip(runs, states, jobs, strict=True)
    ]


def _job_to_ask_for(run: RunDir, state: RunState) -> str | None:
    record = JobRecord.read(run)
    if record is None or state.phase in ("finished", "failed"):
        return None
    fresh = state.active and written_lately(run.state, state.updated, _FRESH_S)
    return None if fresh else record.job


def judge(state: RunState, job: str, info: JobInfo | None, *, told_to_stop: bool) -> RunState:
    """Combine a run's own state and its job's state (pure).

    Args:
        state: The run's own state.
        job: The job's id.
        info: Slurm's information on it, or None if Slurm no longer knows the job.
        told_to_stop: Whether a stop was requested.
    """
    if info is not None and info.alive:
        if info.pending:
            reason = f": {info.reason}" if info.reason else ""
            return replace(state, phase="queued", error=f"job {job} waits{reason}")
        if state.phase == "stopped":  # its script is about to end, or to requeue the job
            return replace(state, phase="stopping")
        return state if state.active else replace(state, phase="starting")
    if state.phase == "stopped" and told_to_stop:
        return state
    if info is not None and info.completing:  # it ends or is requeued: the next poll shows
        return replace(state, phase="stopping")
    if state.phase == "stopped":
        return state
    if told_to_stop and state.phase == "new":
        return replace(state, phase="stopped", exit_code=75, error=f"job {job} was cancelled")
    how = "disappeared" if info is None else f"ended as {info.state}"
    reason = f" ({info.reason})" if info is not None and info.reason else ""
    when = "before the run started" if state.phase == "new" else "before the run finished"
    return replace(state, phase="lost", error=f"Slurm job {job} {how}{reason} {when}")
