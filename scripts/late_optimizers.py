"""Optimizers that might make up for late gradients, for scripts/compare_staleness.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Accumulated(torch.optim.Adam):
    """A step for every few gradients, along their mean: fewer pass while a gradient is late.

    Args:
        params: What is trained.
        lr: Learning rate.
        every: Gradients in a step.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, every: int) -> None:
        super().__init__(params, lr=lr, fused=True)
        self.every = every
        self.have = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.have == 0:
            super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.have = (self.have + 1) % self.every
        if self.have == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.div_(self.every)
            super().step()


class LookAhead(torch.optim.Adam):
    """Activations are computed with the weights that some further steps would lead to.

    Weight prediction as in pipelines without weight stashing (SpecTrain, arXiv:1809.02839; XPipe,
    arXiv:1911.04610): the next steps are taken to be like Adam's last one.

    Args:
        params: What is trained.
        lr: Learning rate.
        steps: How far ahead.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, steps: int) -> None:
        super().__init__(params, lr=lr, fused=True)
        self.steps = steps
        self.own: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p, own in self.own.items():
            p.copy_(own)
        super().step()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                mean = state["exp_avg"] / (1 - beta1 ** float(state["step"]))
                square = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
                self.own[p] = p.clone()
                p.addcdiv_(mean, square.sqrt_().add_(group["eps"]), value=-group["lr"] * self.steps)
