"""``exact`` and ``delayed``: updates by the true gradient, waited for or taken when it arrives."""

from __future__ import annotations

from pydantic import Field

from dni_runtime.core.interfaces.base import MARGIN, Boundary, GradientInterface
from dni_runtime.spec.named import Frozen


class Exact(GradientInterface):
    """Plain backpropagation through the chain: the next batch waits for the true gradient."""

    defers = True
    pending = 1
    blocks = True

    def __init__(self, boundary: Boundary, options: Frozen) -> None:
        super().__init__(boundary, options)
        self.store = self.pending


class DelayedOptions(Frozen):
    """Options of the delayed interface.

    Attributes:
        store: Batches whose activations are kept for their true gradient (default: as many as it
            may be late, and a margin); when it is full the oldest is given up.
    """

    store: int | None = Field(default=None, ge=1, le=1 << 16)


class Delayed(GradientInterface):
    """The true gradient, applied when it arrives to the activations stored for it.

    The weights may have changed since the forward pass: the update is that of an asynchronous
    pipeline without weight stashing (PipeDream, Narayanan et al. 2019, section 3.3).
    """

    Options = DelayedOptions

    defers = True

    def __init__(self, boundary: Boundary, options: DelayedOptions) -> None:
        super().__init__(boundary, options)
        self.store = self.pending = options.store or boundary.late + MARGIN
