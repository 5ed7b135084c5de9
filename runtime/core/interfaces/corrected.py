"""``corrected``: a local gradient at once, corrected by the true one when that comes."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from dni_runtime.core.interfaces.base import (
    Boundary,
    GradientInterface,
    Signal,
    Timing,
    Wanted,
    build_part,
)
from dni_runtime.core.interfaces.local import Local, LocalOptions
from dni_runtime.spec.named import Frozen


class CorrectedOptions(Frozen):
    """Options of the corrected interface."""

    local: LocalOptions = LocalOptions()
    weight: float = Field(default=0.5, gt=0)  # of the local gradient
    # Batches kept for their true gradient; None: as many as it may be late, and a margin.
    store: int | None = Field(default=None, ge=1, le=1 << 16)


class Corrected(GradientInterface):
    """The gradient of a local loss, and later the difference of the true gradient from it.

    In the end each batch has contributed its true gradient; the local one replaces it until it
    comes. The correction is part of the next update.
    """

    Options = CorrectedOptions

    timing = Timing.CORRECTED

    def __init__(self, boundary: Boundary, options: CorrectedOptions) -> None:
        super().__init__(boundary, options)
        self.local = build_part(Local, boundary, options.local, "local")
        self.weight = options.weight
        self.store = options.store

    @classmethod
    def wants(cls, options: CorrectedOptions) -> Wanted:
        return Wanted(1)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        local: Signal = self.local.signal(h_BH, y_BY)
        return local._replace(g_BH=local.g_BH * self.weight)

    def predict(self, h_BH: Tensor) -> Tensor | None:
        p_BP: Tensor | None = self.local.predict(h_BH)
        return p_BP

    def optimizers(self) -> dict[str, Any]:
        optimizers: dict[str, Any] = self.local.optimizers()
        return optimizers
