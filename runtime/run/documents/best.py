"""The best checkpoint so far (``checkpoints/best.json``): the tail writes it."""

from __future__ import annotations

from dni_runtime.run.documents.base import Document


class Best(Document):
    """The best evaluation so far, and its checkpoint."""

    metric: str = ""  # by which evaluations are compared
    cut: int | None = None  # the checkpoint; None: no evaluation was finite
    epoch: int = 0  # after which it was evaluated
    value: float = 0.0  # the metric there
    worse: tuple[int, ...] = ()  # checkpoints of the evaluations since, none of which was better
