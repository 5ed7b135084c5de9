"""A layer as on a device of its own: it takes its time, and next to no processor.

So two cores show what a chain of many devices does: who waits for whom.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A linear map, BatchNorm and ReLU.

    In training a row takes ``row_us`` forward, the same for its part of the input's gradient, and
    the same for the weights' (so that schedules can move these, as "zero bubble" ones do).
    """

    def __init__(self, inputs: int, outputs: int, row_us: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)
        self.row_us = row_us

    def forward(self, x_BI: Tensor) -> Tensor:
        seconds = self.row_us * 1e-6 * len(x_BI) if self.training and not x_BI.is_meta else 0.0
        weight_OI = _Wait.apply(self.linear.weight, 0.0, seconds)
        x_BI = _Wait.apply(x_BI, seconds, seconds)
        return torch.relu(self.norm(F.linear(x_BI, weight_OI, self.linear.bias)))


class _Wait(torch.autograd.Function):
    """The same tensor, after so many seconds; its gradient after others."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None
