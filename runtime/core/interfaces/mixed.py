"""Interfaces with a local head as a part: ``mixed``, the default, and ``corrected``.

``mixed`` is a synthesizer beside a head. The head gives a signal from the first step, while the
synthesizer is still zero, and keeps late gradients from hurting; the synthesizer brings the losses
of the modules downstream, the chain's own among them. ``corrected`` is a local gradient at once,
corrected by the true one when that comes.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from dni_runtime.core.interfaces.base import (
    Boundary,
    GradientInterface,
    LateSignal,
    Needs,
    Signal,
    Timing,
    build_part,
)
from dni_runtime.core.interfaces.local import Local, LocalOptions
from dni_runtime.core.interfaces.synthetic import Synthetic, SyntheticOptions
from dni_runtime.spec.named import Frozen


class MixedSyntheticOptions(SyntheticOptions):
    """Options of the synthesizer beside a head, with other defaults."""

    # What the module downstream computes at once has its head's gradient here: it needs no true
    # one, and is never late.
    bootstrapped: bool = True


class MixedOptions(Frozen):
    """Options of the mixed interface."""

    synthetic: MixedSyntheticOptions = MixedSyntheticOptions()
    local: LocalOptions = LocalOptions()
    local_weight: float = Field(default=0.5, gt=0)  # of the local loss, beside the chain's


class Mixed(GradientInterface):
    """The sum of a synthetic gradient and a weighted local one."""

    Options = MixedOptions

    def __init__(self, boundary: Boundary, options: MixedOptions) -> None:
        super().__init__(boundary, options)
        self.synthetic = build_part(Synthetic, boundary, options.synthetic, "synthetic")
        self.local = build_part(Local, boundary, options.local, "local")
        self.local_weight = options.local_weight
        self.store = self.synthetic.store

    @classmethod
    def needs(cls, options: MixedOptions) -> Needs:
        return Synthetic.needs(options.synthetic)._replace(labels=True)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        predicted = self.synthetic.signal(h_BH, y_BY)
        local = self.local.signal(h_BH, y_BY)
        g_BH = predicted.g_BH.add(local.g_BH, alpha=self.local_weight)
        return Signal(g_BH, local.loss, local.p_BP)

    def learn(
        self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor, *, measure: bool
    ) -> LateSignal | None:
        return self.synthetic.learn(h_BH, y_BY, g_BH, measure=measure)

    def predict(self, h_BH: Tensor) -> Tensor | None:
        return self.local.predict(h_BH)

    def optimizers(self) -> dict[str, Any]:
        return {**self.synthetic.optimizers(), **self.local.optimizers()}


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
    def needs(cls, options: CorrectedOptions) -> Needs:
        return Needs(1)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        local = self.local.signal(h_BH, y_BY)
        return local._replace(g_BH=local.g_BH * self.weight)

    def predict(self, h_BH: Tensor) -> Tensor | None:
        return self.local.predict(h_BH)

    def optimizers(self) -> dict[str, Any]:
        return self.local.optimizers()
