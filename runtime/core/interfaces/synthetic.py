"""``synthetic``: the gradient predicted from the activation (Jaderberg et al. 2016, sec. 2.1)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dni_runtime.core.finite import finite
from dni_runtime.core.interfaces.base import (
    Boundary,
    GradientInterface,
    LateSignal,
    Needs,
    Signal,
    as_in,
)
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.synthesizers import build_synthesizer
from dni_runtime.core.training import build_optimizer
from dni_runtime.spec import Choice
from dni_runtime.spec.named import Frozen


class SyntheticOptions(Frozen):
    """Options of the synthetic gradient interface."""

    synthesizer: Choice = Choice(name="auto")
    conditioned: bool = True  # the synthesizer sees the label (cDNI)
    optimizer: Choice = Choice(name="Adam", args={"lr": 0.001})  # the synthesizer's
    scale: float = Field(default=1.0, gt=0)  # factor on the predicted gradient
    # Learn from what the module downstream computes at once from its own synthetic gradient, as in
    # the paper (sec. 2.1), instead of the true gradient. That comes sooner, but teaches the errors
    # made downstream, too.
    bootstrapped: bool = False
    # Learn from the gradient of every n-th batch; the module downstream does not compute the others
    # (the paper's sparse updates, sec. 3.1).
    learn_every: int = Field(default=1, ge=1)
    # Batches kept for late gradients; None: as many as they may be late, and a margin.
    store: int | None = Field(default=None, ge=1, le=1 << 16)


class Synthetic(GradientInterface):
    """Predicts the gradient; the synthesizer learns from late true gradients."""

    Options = SyntheticOptions

    def __init__(self, boundary: Boundary, options: SyntheticOptions) -> None:
        super().__init__(boundary, options)
        known = boundary.labelled
        self.synthesizer = build_synthesizer(
            options.synthesizer,
            boundary.activation,
            boundary.label if options.conditioned else None,
            boundary.classes if known else None,
            ("synthesizer",),
            loss=ChainLoss(boundary.loss, boundary.prediction, boundary.label) if known else None,
        )
        self.options = options
        self.store = options.store
        self._optimizer = build_optimizer(
            options.optimizer, self.synthesizer.parameters(), ("optimizer",)
        )

    @classmethod
    def needs(cls, options: SyntheticOptions) -> Needs:
        return Needs(
            options.learn_every, bootstrapped=options.bootstrapped, labels=options.conditioned
        )

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        with torch.no_grad():
            g_BH = self.synthesizer.predict(as_in(self.synthesizer, h_BH), y_BY)
            g_BH = g_BH if self.options.scale == 1 else g_BH * self.options.scale
            return Signal(g_BH.to(h_BH.dtype))

    def learn(
        self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor, *, measure: bool
    ) -> LateSignal | None:
        """Train the synthesizer one step on its lesson, if the loss is finite."""
        h_BH, g_BH = as_in(self.synthesizer, h_BH), as_in(self.synthesizer, g_BH)
        predicted_BH, loss = self.synthesizer.lesson(h_BH, y_BY, g_BH)
        if self.checks and not finite(loss):
            return None
        if measure and predicted_BH is None:
            with torch.no_grad():
                predicted_BH = self.synthesizer.predict(h_BH, y_BY)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
        self._optimizer.step()
        if not measure:
            return None
        assert predicted_BH is not None
        with torch.no_grad():
            error = F.mse_loss(predicted_BH, g_BH, reduction="sum")
            cosine = F.cosine_similarity(predicted_BH.flatten(), g_BH.flatten(), dim=0)
            return LateSignal(error / g_BH.square().sum().clamp_min(1e-30), cosine)

    def optimizers(self) -> dict[str, Any]:
        return {"synthesizer": self._optimizer}
