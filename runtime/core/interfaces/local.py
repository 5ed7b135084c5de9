"""``local``: an auxiliary head with its own loss.

Decoupled greedy learning (Belilovsky et al. 2020, arXiv:1901.08164).
The head is also an early exit for inference. Beside its loss there may be one of similarities
(Nøkland and Eidnes 2019, arXiv:1901.06656), and in front of it layers like those of the next
modules (as in AugLocal, Ma et al. 2024, arXiv:2402.17318).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.finite import finite
from dni_runtime.core.interfaces.base import Boundary, GradientInterface, Signal, Wanted
from dni_runtime.core.interfaces.heads import HeadOptions, build_ahead, build_head
from dni_runtime.core.interfaces.similarity import SimilarityLoss
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.training import build_optimizer
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice


class LocalOptions(HeadOptions):
    """Options of the local gradient interface."""

    # Share of the loss of similarities in the local loss; 0.99: as in the paper.
    similarity: float = Field(default=0.0, ge=0, lt=1)
    # Number of next modules whose layers the head starts with; their weights are its own, and
    # trained with it. If the tail is among them, they are the head.
    lookahead: int = Field(default=0, ge=0, le=1024)
    optimizer: Choice | None = None  # the head's; None: the module's


class Local(GradientInterface):
    """The gradient of a local loss; nothing comes from downstream."""

    Options = LocalOptions

    def __init__(self, boundary: Boundary, options: LocalOptions) -> None:
        super().__init__(boundary, options)
        self.loss = ChainLoss(boundary.loss, boundary.prediction, boundary.label)
        self.head = self._head(boundary, options)
        self._looks_ahead = boundary.ahead is not None
        self.similarity: SimilarityLoss | None = None
        self.similarity_share = options.similarity
        if options.similarity:
            self.similarity = SimilarityLoss(boundary.activation, boundary.label, boundary.classes)
        trained = [p for part in (self.head, self.similarity) if part for p in part.parameters()]
        own = options.optimizer
        try:
            self._optimizer = build_optimizer(own or boundary.optimizer, trained, ("optimizer",))
        except SpecError as error:
            hint = "the early head uses the module's optimizer unless 'optimizer' names one for it"
            raise SpecError(
                error.message, location=error.location, hint=error.hint if own else hint
            ) from None

    def _head(self, boundary: Boundary, options: LocalOptions) -> nn.Sequential:
        activation, ahead = boundary.activation, boundary.ahead
        if ahead is None:
            return build_head(activation, boundary.prediction, options, self.loss.class_axis)
        layers = build_ahead(activation, ahead)
        if ahead.ends:
            return layers
        head = build_head(ahead.output, boundary.prediction, options, self.loss.class_axis)
        return nn.Sequential(layers, head)

    @classmethod
    def wants(cls, options: LocalOptions) -> Wanted:
        return Wanted(0, lookahead=options.lookahead)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        h_BH = h_BH.detach().requires_grad_()
        p_BP = self._predictions(h_BH)
        loss = self.loss(p_BP, y_BY)
        if self.similarity is not None:
            unlike = self.similarity(h_BH, y_BY, self.loss.valid(y_BY))
            loss = torch.lerp(loss, unlike, self.similarity_share)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not self.checks or finite(loss):
            self._optimizer.step()
        assert h_BH.grad is not None
        return Signal(h_BH.grad.mul_(len(h_BH)), loss.detach(), p_BP.detach())

    def _predictions(self, h_BH: Tensor) -> Tensor:
        """Return the head's output; the next modules' layers may change their input in place."""
        return cast("Tensor", self.head(h_BH.clone() if self._looks_ahead else h_BH))

    def predict(self, h_BH: Tensor) -> Tensor:
        self.head.eval()
        try:
            with torch.no_grad():
                return self._predictions(h_BH)
        finally:
            self.head.train()

    def optimizers(self) -> dict[str, Any]:
        return {"head": self._optimizer}
