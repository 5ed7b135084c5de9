"""``none``: no error signal, so the module keeps its initial weights.

The control that shows how much the others learn: the modules below the tail are random features
("no backprop" in Jaderberg et al. 2016, sec. 3.1). Only BatchNorm's running statistics follow the
data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dni_runtime.core.interfaces.base import GradientInterface, Signal


class Untrained(GradientInterface):
    """Gives no signal and wants no gradient."""

    trains = False

    @classmethod
    def gradient_every(cls, options: Any) -> int:
        return 0

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        return Signal(torch.zeros_like(h_BH))
