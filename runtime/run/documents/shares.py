"""Parts of an evaluation that replicas of the tail have counted."""

from __future__ import annotations

from typing import Any

from dni_runtime.run.documents.base import Document


class Share(Document):
    """A line of ``ledger/TAIL.shares.jsonl``."""

    begun: int = 0  # which start of the whole chain it is of
    id: int  # the marker at the end of the evaluation
    step: int  # training batches of the replica until then
    # Its part of them (``Evaluation.to_dict``); None: it got no batch.
    sums: dict[str, Any] | None = None
