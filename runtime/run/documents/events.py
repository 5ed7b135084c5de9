"""Events of a run, which its supervisor appends to ``events.jsonl``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, SkipValidation

from dni_runtime.run.documents.base import Document

EventKind = Literal[
    "run_started", "run_running", "run_adopted", "run_stalled", "run_progressing", "run_stopping",
    "run_ended", "worker_started", "worker_running", "worker_ended", "worker_restarting",
    "worker_killed", "worker_diverged", "worker_warning", "worker_moved", "restart_requested",
    "checkpoint_damaged", "node_lost", "scale_requested", "scaled", "replica_lost",
    "no_room", "callback_failed", "run_extended",
]  # fmt: skip


class Event(Document):
    """Something that has happened; an event has the fields of its kind (docs/operations.md)."""

    model_config = ConfigDict(extra="allow")  # readers show what they do not know

    time: float = 0.0
    event: Annotated[EventKind, SkipValidation]
    module: str | None = None
    modules: list[str] = Field(default_factory=list)
    replicas: dict[str, int] = Field(default_factory=dict)
    attempt: int | None = None
    backend: str | None = None
    pid: int | None = None
    state: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    delay_s: float | None = None
    reason: str | None = None
    after_s: float | None = None
    epochs: int | None = None
    batch: int | None = None
    what: str | None = None
    times: int | None = None
    warning: str | None = None
    error: str | None = None
    node: str | None = None
    from_: str | None = Field(None, alias="from")
    to: str | None = None
