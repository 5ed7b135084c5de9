"""How a loss takes labels: number by number, or as classes along an axis.

Shape suffixes: B samples, P one prediction, Y one label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from dni_runtime.spec import TensorSpec

SIGNS = (nn.SoftMarginLoss, nn.HingeEmbeddingLoss)
"""Losses whose labels are -1 and 1, and nothing between: torch learns nothing of 0, or both."""

_PAIRED: dict[type[nn.Module], tuple[float, float]] = {
    **dict.fromkeys((nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss), (-math.inf, math.inf)),
    **dict.fromkeys((nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss), (0, 1)),
    **dict.fromkeys(SIGNS, (-1, 1)),
    nn.PoissonNLLLoss: (0, math.inf),
    nn.KLDivLoss: (-math.inf, math.inf),
}
"""Losses that compare a prediction's numbers one by one with a label's, and the labels' range."""


def pairs(function: nn.Module) -> tuple[float, float] | None:
    """Return the range of labels of a loss that compares numbers one by one; None for others."""
    return _PAIRED.get(type(function))  # a user's subclass computes in its own way


def lined_up(p_BP: Tensor, y_BY: Tensor) -> Tensor:
    """Return labels as numbers to compare with predictions one by one."""
    if p_BP.shape != y_BY.shape and alike(p_BP.shape[1:], y_BY.shape[1:]):
        y_BY = y_BY.reshape(p_BP.shape)
    return y_BY if y_BY.is_floating_point() else y_BY.to(p_BP.dtype)


def alike(*shapes: Sequence[int]) -> bool:
    """Whether shapes differ by axes of length 1 only."""
    first, second = ([size for size in shape if size != 1] for shape in shapes)
    return first == second


def labels_each_token(activation: TensorSpec, label: TensorSpec) -> bool:
    """Whether an activation is of tokens (T x C), and each has a label of its own."""
    return len(activation.shape) == 2 and label.shape == activation.shape[:1]


def class_axis(prediction: TensorSpec, label: TensorSpec) -> int | None:
    """Return the axis of a batch of predictions that holds the classes; see :class:`ChainLoss`."""
    if not integer(label) or len(prediction.shape) != len(label.shape) + 1:
        return None
    if prediction.shape[1:] == label.shape:
        return 1
    return len(prediction.shape) if prediction.shape[:-1] == label.shape else None


def integer(label: TensorSpec) -> bool:
    return label.dtype.startswith(("int", "uint"))
