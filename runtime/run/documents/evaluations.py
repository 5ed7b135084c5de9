"""What the tail keeps of evaluations: the best one, and the parts that replicas have counted."""

from __future__ import annotations

from typing import Any

from dni_runtime.run.documents.base import Document


class Best(Document):
    """The best evaluation so far, and its checkpoint (``checkpoints/best.json``)."""

    metric: str = ""  # by which evaluations are compared
    cut: int | None = None  # the checkpoint; None: no evaluation was finite
    epoch: int = 0  # after which it was evaluated
    value: float = 0.0  # the metric there
    worse: tuple[int, ...] = ()  # checkpoints of the evaluations since, none of which was better


class Share(Document):
    """A line of ``ledger/TAIL.shares.jsonl``."""

    begun: int = 0  # which start of the whole chain it is of
    id: int  # the marker at the end of the evaluation
    step: int  # training batches of the replica until then
    # Its part of them (``Evaluation.to_dict``); None: it got no batch.
    sums: dict[str, Any] | None = None
