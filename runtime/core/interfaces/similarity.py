"""Similarity matching: samples are to be as similar to each other as their labels are.

Nøkland and Eidnes 2019, "Training neural networks with local error signals" (arXiv:1901.06656).
Shape suffixes: B samples, C channels or classes, F features.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.errors import SpecError
from dni_runtime.spec import TensorSpec

_EPS = 1e-8
_FEW_CHANNELS = 3
"""Largest number that is too small to tell samples apart by their deviations."""


class SimilarityLoss(nn.Module):
    """Mean squared difference of the similarities of activations and of one-hot labels.

    Activations go through a linear map of their own first, maps (C x H x W) through a 3 x 3
    convolution, tokens (T x C) through a map of each. For maps and tokens, each channel's standard
    deviation over the places is compared (the paper's code does so if there are several places and
    more than three channels, and else takes all values). Samples whose label is ignored are
    left out.

    Args:
        activation: One sample of the activation.
        label: One sample's label.
        classes: Number of classes; None if labels are not class indices.

    Raises:
        SpecError: There is no class label for each sample.
    """

    def __init__(self, activation: TensorSpec, label: TensorSpec, classes: int | None) -> None:
        super().__init__()
        if classes is None or label.shape:
            raise SpecError(
                f"'similarity' needs one class label for each sample, labels are {label}",
                location=("similarity",),
                hint="leave 'similarity' out",
            )
        self.classes = classes
        self.map: nn.Module
        self.places: tuple[int, ...]
        if len(activation.shape) == 3:
            channels, *sides = activation.shape
            self.map = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.places, places = (-2, -1), math.prod(sides)
        elif len(activation.shape) == 2:
            places, channels = activation.shape
            self.map = nn.Linear(channels, channels, bias=False)
            self.places = (-2,)
        else:
            channels, places = math.prod(activation.shape), 1
            self.map = nn.Sequential(nn.Flatten(), nn.Linear(channels, channels, bias=False))
            self.places = ()
        if places == 1 or channels <= _FEW_CHANNELS:
            self.places = ()

    def forward(self, h_BH: Tensor, y_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
        """Return the difference, as a mean over all pairs of samples.

        Args:
            h_BH: The activation.
            y_B: Class labels.
            valid_B: Which of them count; None: all do.
        """
        z_BF = self.map(h_BH)
        z_BF = z_BF.std(self.places) if self.places else z_BF.flatten(1)
        known_B = y_B if valid_B is None else y_B.masked_fill(~valid_B, 0)
        one_hot_BC = F.one_hot(known_B, self.classes).to(z_BF.dtype)
        difference_BB = (similarities(z_BF) - similarities(one_hot_BC)).square()
        if valid_B is None:
            return difference_BB.mean()
        pairs_BB = valid_B.unsqueeze(0) & valid_B.unsqueeze(1)
        return (difference_BB * pairs_BB).sum() / pairs_BB.sum().clamp_min(1)


def similarities(x_BF: Tensor) -> Tensor:
    """Return cosines between samples, each centred over its own features: ``[B, B]``."""
    x_BF = F.normalize(x_BF - x_BF.mean(1, keepdim=True), dim=1, eps=_EPS)
    return x_BF @ x_BF.mT
