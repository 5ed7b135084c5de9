"""``none``: no error signal, so the module keeps its initial weights.

The control that shows how much the others learn: the modules below the tail are random features
("no backprop" in Jaderberg et al. 2016, sec. 3.1). Only BatchNorm's running statistics follow the
data. True gradients for a module upstream pass through it.
"""

from __future__ import annotations

from typing import Any

from dni_runtime.core.interfaces.base import GradientInterface, Timing, Wanted


class Untrained(GradientInterface):
    """Returns no signal and needs no gradient."""

    timing = Timing.NEVER

    @classmethod
    def wants(cls, options: Any) -> Wanted:
        return Wanted(0, labels=False)
