"""Early exits of a run (``exits/exits.json``): ``dnictl exits`` writes it, what serves reads it."""

from __future__ import annotations

from pydantic import Field

from dni_runtime.run.documents.base import Document
from dni_runtime.spec import Choice


class Exit(Document):
    """A place where the chain's answer can be had: an early head, or the chain's output."""

    module: str
    head: Choice | None = None  # a gradient interface; None: the chain's output
    accuracy: float = 0.0
    agreement: float = 0.0  # share of samples with the answer of the chain's output
    sends: dict[str, int] = Field(default_factory=dict)  # bytes of a sample, by type on the wire
    # Rising confidences, and the share of right answers among samples of like confidence.
    confidence: tuple[float, ...] = ()
    right: tuple[float, ...] = ()


class Rule(Document):
    """Who leaves where, and what that costs on samples that had no part in the choice."""

    points: float | None = None  # of accuracy that may be lost; None: thresholds were given
    thresholds: tuple[float | None, ...] = ()  # of early heads; None: no sample leaves there
    leave: tuple[float, ...] = ()  # share of samples, at each exit; the last one: the rest
    accuracy: float = 0.0
    lost: tuple[float, float, float] = (0.0, 0.0, 0.0)  # points; between the ends of 95 %
    verdict: str = ""  # whether at most ``points`` are lost: holds, broken, not shown


class Exits(Document):
    """The exits of a checkpoint, the chain's output last, and rules by which samples leave."""

    checkpoint: int
    held_out: bool = True  # the samples had no part in the training, and are no test data
    samples: int = 0  # half of them chose the thresholds, the others checked them
    input_bytes: dict[str, int] = Field(default_factory=dict)  # of a sample, likewise
    exits: tuple[Exit, ...] = ()
    rules: tuple[Rule, ...] = ()  # the first one was requested, others are of usual promises
