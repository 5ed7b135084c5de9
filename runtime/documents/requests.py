"""Requests to a run, and what they change in its stream."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt

from dni_runtime.documents.base import Document
from dni_runtime.spec.members import Active, active_of


class Stop(Document):
    """The content of ``stop.json``.

    Attributes:
        time: Unix time of the request.
        timeout_s: Seconds until workers that still run are killed; None: the chain's.
    """

    time: float = 0.0
    timeout_s: float | None = None


class Scale(Document):
    """The content of ``scale.json``.

    Attributes:
        replicas: How many replicas are wanted, by module, as somebody has asked for.
        balanced: How many balance the chain, of other modules.
        left: How many are left at most since replicas were lost, until the run is started again or
            somebody asks for more.
    """

    replicas: dict[str, PositiveInt] = Field(default_factory=dict)
    balanced: dict[str, PositiveInt] = Field(default_factory=dict)
    left: dict[str, PositiveInt] = Field(default_factory=dict)


class Replicas(Document):
    """The content of ``ledger/replicas.json``.

    Attributes:
        active: The replicas that are to take batches.
        lost: Those that are gone for good, each with the newest cut before that.
    """

    active: Annotated[Active, BeforeValidator(active_of)]
    lost: dict[str, int] = Field(default_factory=dict)


class Requested(Document):
    """A line of ``ledger/HEAD.marks.jsonl``: what is to be put into the stream on request.

    Attributes:
        begun: Which start of the whole chain it is of.
        round: Which line of that start (``worker/rounds.py``).
        id: Its position; of a replica of the head, the lowest one that it has not used.
        mark: The bits of the marker; 0: none.
        ends: Whether training is to end from there on.
        body: The marker's body.
        heads: The replicas of the head that have a line in this round; empty: all.
    """

    begun: int = 0
    round: int = 0
    id: int
    mark: int
    ends: bool = False
    body: dict[str, Any] = Field(default_factory=dict)
    heads: tuple[PositiveInt, ...] = ()
