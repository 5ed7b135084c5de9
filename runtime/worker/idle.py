"""Training on replayed or synthetic inputs, while nothing comes from upstream.

``replay`` trains again on recent batches, as asynchronous decoupled greedy learning does with its
replay buffer (Belilovsky et al. 2020, arXiv:1901.08164); ``synthetic_inputs`` trains on inputs
predicted from their labels, the forward unlock of decoupled neural interfaces (Jaderberg et al.
2016, sec. 2.2 and 3.1). There a module's input is predicted from the chain's sample; here from the
label, which every module has. Nothing is sent on: downstream has a buffer or a model of its own.

Shapes: B batch, X one sample's input, Y its label, C classes.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from typing import Self

import torch
from torch import Tensor, nn

from dni_runtime.core.labels import labels_each_token
from dni_runtime.core.step import ModuleStep
from dni_runtime.spec import TensorSpec
from dni_runtime.worker.join import Join

RATE = 0.1
"""Share of a batch in the running means."""


class InputModel(nn.Module):
    """Draws inputs of a module: the mean of those with the label, and noise of their variance.

    Both follow the true ones. With a label per token, each token is predicted by itself. If
    ``classes`` is None, labels are numbers, and inputs do not depend on them.
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


SILENT_S = 0.5
"""Silence on the input after which the module upstream may be gone."""

LABELS_KEPT = 64
"""Batches of labels that synthetic inputs are drawn for."""


class ReplayBuffer:
    """Recent training batches, returned in random order without torch's random numbers."""

    def __init__(self, size: int, seed: int) -> None:
        self._kept: deque[tuple[tuple[Tensor, ...], Tensor]] = deque(maxlen=size)
        self._random = random.Random(seed)
        self.replayed = 0  # batches returned

    def keep(self, xs: tuple[Tensor, ...], y_BY: Tensor) -> None:
        """Keep a batch that the module has been trained on, in place of the oldest one."""
        self._kept.append((xs, y_BY))

    def choose(self) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Return a random batch; None if there is none."""
        if not self._kept:
            return None
        self.replayed += 1
        return self._random.choice(self._kept)


class SyntheticInputs:
    """Inputs predicted from the labels of recent batches; true inputs train the prediction.

    The module has one input.
    """

    def __init__(self, step: ModuleStep) -> None:
        spec = step.spec
        (sample,) = spec.inputs
        self._model = InputModel(sample, spec.label, spec.classes).to(step.device)
        self._labels: deque[Tensor] = deque(maxlen=LABELS_KEPT)
        self._like: Tensor | None = None
        self._random = random.Random(spec.seed)
        self._generator = torch.Generator().manual_seed(spec.seed)
        self.replayed = 0

    def keep(self, xs: tuple[Tensor, ...], y_BY: Tensor) -> None:
        """Learn from a true batch."""
        (x_BX,) = xs
        self._model.learn(x_BX.detach(), y_BY)
        self._labels.append(y_BY)
        self._like = x_BX[:1].detach()

    def choose(self) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Return synthetic inputs for a recent batch's labels; None if there is none."""
        if self._like is None:
            return None
        self.replayed += 1
        y_BY = self._random.choice(self._labels)
        like_BX = self._like.expand(len(y_BY), *self._like.shape[1:])
        return (self._model.draw(like_BX, y_BY, self._generator),), y_BY


class Idle:
    """Trains a module on replayed or synthetic inputs while the module upstream is gone, or late.

    With ``late`` it trains whenever the next batch has not arrived yet.
    """

    def __init__(
        self,
        step: ModuleStep,
        input: Join,
        source: ReplayBuffer | SyntheticInputs,
        *,
        late: bool,
    ) -> None:
        self.source = source
        self._step = step
        self._input = input
        self._late = late
        self._heard_s = time.monotonic()

    @classmethod
    def of(cls, step: ModuleStep, input: Join | None) -> Self | None:
        """Make what the module's spec asks for; None if that is nothing, or is impossible."""
        links = step.spec.links
        if input is None or not step.replays:
            return None
        if links.synthetic_inputs is not None:
            late = links.synthetic_inputs == "late"
            return cls(step, input, SyntheticInputs(step), late=late)
        if links.replay:
            return cls(step, input, ReplayBuffer(links.replay, step.spec.seed), late=False)
        return None

    def heard(self) -> None:
        """Note that something has come from upstream."""
        self._heard_s = time.monotonic()

    def train(self) -> bool:
        """Train on one batch, if it is time to; return whether it did."""
        if not self._late and not self._gone():
            return False
        chosen = self.source.choose()
        if chosen is None:
            return False
        self._step.replay(*chosen)
        return True

    def _gone(self) -> bool:
        if time.monotonic() - self._heard_s < SILENT_S:
            return False
        if self._input.reaches_peers():
            self.heard()  # it is alive, and slow
            return False
        return True
