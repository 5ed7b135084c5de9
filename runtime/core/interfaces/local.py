"""``local``: an auxiliary head with its own loss.

Decoupled greedy learning (Belilovsky et al. 2020, arXiv:1901.08164).
The head is also an early exit for inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dni_runtime.core.finite import finite
from dni_runtime.core.interfaces.base import Boundary, GradientInterface, Signal, Wanted
from dni_runtime.core.interfaces.heads import HeadOptions, build_head
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.training import build_optimizer
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice


class LocalOptions(HeadOptions):
    """Options of the local gradient interface."""

    optimizer: Choice | None = None  # the head's; None: the module's


class Local(GradientInterface):
    """The gradient of a local loss; nothing comes from downstream."""

    Options = LocalOptions

    def __init__(self, boundary: Boundary, options: LocalOptions) -> None:
        super().__init__(boundary, options)
        self.loss = ChainLoss(boundary.loss, boundary.prediction, boundary.label)
        self.head = build_head(
            boundary.activation, boundary.prediction, options, self.loss.class_axis
        )
        trained = list(self.head.parameters())
        own = options.optimizer
        try:
            self._optimizer = build_optimizer(own or boundary.optimizer, trained, ("optimizer",))
        except SpecError as error:
            hint = "the early head uses the module's optimizer unless 'optimizer' names one for it"
            raise SpecError(
                error.message, location=error.location, hint=error.hint if own else hint
            ) from None

    @classmethod
    def wants(cls, options: LocalOptions) -> Wanted:
        return Wanted(0)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        h_BH = h_BH.detach().requires_grad_()
        p_BP = self.head(h_BH)
        loss = self.loss(p_BP, y_BY)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not self.checks or finite(loss):
            self._optimizer.step()
        assert h_BH.grad is not None
        return Signal(h_BH.grad.mul_(len(h_BH)), loss.detach(), p_BP.detach())

    def predict(self, h_BH: Tensor) -> Tensor:
        self.head.eval()
        try:
            with torch.no_grad():
                p_BP: Tensor = self.head(h_BH)
                return p_BP
        finally:
            self.head.train()

    def optimizers(self) -> dict[str, Any]:
        return {"head": self._optimizer}
