"""Parts of an evaluation that replicas of the tail have counted."""

from __future__ import annotations

from typing import Any

from dni_runtime.documents.base import Document


class Share(Document):
    """A line of ``ledger/TAIL.shares.jsonl``.

    Attributes:
        begun: Which start of the whole chain it is of.
        id: The marker at the end of the evaluation.
        step: Training batches of the replica until then.
        sums: Its part of the sums (``Evaluation.to_dict``); None: it got no batch.
    """

    begun: int = 0
    id: int
    step: int
    sums: dict[str, Any] | None = None
