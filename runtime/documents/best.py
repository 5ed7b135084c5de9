"""The best checkpoint so far (``checkpoints/best.json``): the tail writes it."""

from __future__ import annotations

from dni_runtime.documents.base import Document


class Best(Document):
    """The best evaluation so far, and its checkpoint.

    Attributes:
        metric: The metric by which evaluations are compared.
        cut: The checkpoint; None if no evaluation was finite.
        epoch: The epoch after which it was evaluated.
        value: The metric there.
        worse: The checkpoints of the evaluations since, none of which was better.
    """

    metric: str = ""
    cut: int | None = None
    epoch: int = 0
    value: float = 0.0
    worse: tuple[int, ...] = ()
