"""Requests to a run, and what they change in its stream."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from dni_runtime.run.documents.base import Document


class Stop(Document):
    """The content of ``stop.json``."""

    time: float = 0.0  # Unix time
    timeout_s: float | None = None  # until workers that still run are killed; None: the chain's


class Scale(Document):
    """The content of ``scale.json``."""

    # By module, as somebody has asked for.
    replicas: dict[str, PositiveInt] = Field(default_factory=dict)
    # Of other modules: as many as balance the chain.
    balanced: dict[str, PositiveInt] = Field(default_factory=dict)
    # Upper limits after replicas were lost. A restart of the run, or a request for more, lifts
    # them.
    limits: dict[str, PositiveInt] = Field(default_factory=dict)


class MarkRequest(Document):
    """A line of ``ledger/HEAD.marks.jsonl``: what is to be put into the stream on request."""

    begun: int = 0  # which start of the whole chain it is of
    round: int = 0  # which line of that start (``worker/head.py``)
    id: int  # its position; of a replica of the head, the lowest one that it has not used
    mark: int  # bits of the marker; 0: none
    ends: bool = False  # training is to end from there on
    samples: tuple[int | None, ...] = ()  # of a replica of the head, in its first line
