"""Synthetic inputs: what a module trains on while none come from upstream.

The forward unlock of Jaderberg et al. 2016 (sec. 2.2 and 3.1) predicts a module's input from the
chain's sample. Here it is predicted from the label, which every module has: by the mean of the
inputs with that label, and noise of their variance around it.

Shapes: B batch, X one sample's input, Y its label, C classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dni_runtime.core.labels import labels_each_token
from dni_runtime.spec import TensorSpec

RATE = 0.1
"""Share of a batch in the running means."""


class InputModel(nn.Module):
    """Draws inputs of a module, given labels; means and variances follow the true ones.

    With a label per token, each token is predicted by itself. If ``classes`` is None, labels are
    numbers, and inputs do not depend on them.
    """

    mean_CX: Tensor
    variance_CX: Tensor
    seen_C: Tensor

    def __init__(self, activation: TensorSpec, label: TensorSpec, classes: int | None) -> None:
        super().__init__()
        self.per_token = labels_each_token(activation, label)
        if label.shape and not self.per_token:
            classes = None
        self.classes = classes or 1
        self._known = classes is not None
        features = activation.shape[-1] if self.per_token else math.prod(activation.shape)
        self.register_buffer("mean_CX", torch.zeros(self.classes, features))
        self.register_buffer("variance_CX", torch.zeros(self.classes, features))
        self.register_buffer("seen_C", torch.zeros(self.classes, dtype=torch.bool))

    @torch.no_grad()
    def learn(self, x_BX: Tensor, y_BY: Tensor) -> None:
        """Update means and variances by a batch of true inputs."""
        rows, index = self._rows(x_BX, y_BY)
        count_C = torch.bincount(index, minlength=self.classes).clamp_min(1).unsqueeze(1)
        found_C = torch.bincount(index, minlength=self.classes) > 0
        mean_CX = torch.zeros_like(self.mean_CX).index_add_(0, index, rows) / count_C
        rest = (rows - torch.where(self.seen_C[:, None], self.mean_CX, mean_CX)[index]).square()
        variance_CX = torch.zeros_like(self.mean_CX).index_add_(0, index, rest) / count_C
        for running, new in ((self.mean_CX, mean_CX), (self.variance_CX, variance_CX)):
            rate_C = torch.where(self.seen_C, RATE, 1.0) * found_C
            running.lerp_(new, rate_C.unsqueeze(1))
        self.seen_C |= found_C

    @torch.no_grad()
    def draw(self, x_BX: Tensor, y_BY: Tensor, generator: torch.Generator) -> Tensor:
        """Draw inputs for labels, in the shape and type of ``x_BX``."""
        _, index = self._rows(x_BX, y_BY)
        noise = torch.randn(
            len(index), self.mean_CX.shape[1], generator=generator, device=generator.device
        ).to(self.mean_CX.device)
        rows = self.mean_CX[index] + noise * self.variance_CX[index].sqrt()
        return rows.reshape(x_BX.shape).to(x_BX.dtype)

    def _rows(self, x_BX: Tensor, y_BY: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs as rows, and the class of each; ignored labels count as the first."""
        rows = x_BX.flatten(0, 1) if self.per_token else x_BX.flatten(1)
        if not self._known:
            return rows.float(), torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        return rows.float(), y_BY.flatten().clamp(0, self.classes - 1)
