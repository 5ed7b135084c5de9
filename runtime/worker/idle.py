"""Training on replayed or synthetic inputs, while nothing comes from upstream.

``replay`` trains again on recent batches, as asynchronous decoupled greedy learning does with its
replay buffer (Belilovsky et al. 2020, arXiv:1901.08164); ``synthetic_inputs`` trains on inputs
predicted from their labels, the forward unlock of decoupled neural interfaces (Jaderberg et al.
2016, sec. 2.2). Nothing is sent on: downstream has a buffer or a model of its own.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Protocol, Self

import torch
from torch import Tensor

from dni_runtime.core.inputs import InputModel
from dni_runtime.core.step import ModuleStep
from dni_runtime.worker.join import Join

SILENT_S = 0.5
"""Silence on the input after which the module upstream may be gone."""

LABELS_KEPT = 64
"""Batches of labels that synthetic inputs are drawn for."""


class BatchSource(Protocol):
    """Source of batches while none come from upstream; ``replayed`` counts those returned."""

    replayed: int

    def keep(self, xs: tuple[Tensor, ...], y_BY: Tensor) -> None:
        """Note a batch that the module has been trained on."""
        ...

    def choose(self) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Return a batch to train on; None if there is none yet."""
        ...


class ReplayBuffer:
    """Recent training batches, returned in random order without torch's random numbers."""

    def __init__(self, size: int, seed: int) -> None:
        self._kept: deque[tuple[tuple[Tensor, ...], Tensor]] = deque(maxlen=size)
        self._random = random.Random(seed)
        self.replayed = 0

    def keep(self, xs: tuple[Tensor, ...], y_BY: Tensor) -> None:
        """Keep a batch, in place of the oldest one."""
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
        (given,) = spec.inputs
        self._model = InputModel(given, spec.label, spec.classes).to(step.device)
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

    def __init__(self, step: ModuleStep, input: Join, source: BatchSource, *, late: bool) -> None:
        self._step = step
        self._input = input
        self._source = source
        self._late = late
        self._heard_s = time.monotonic()

    @classmethod
    def of(cls, step: ModuleStep, input: Join | None) -> Self | None:
        """Make what the module's spec asks for; None if that is nothing, or is impossible."""
        links = step.spec.links
        if input is None or not step.replays:
            return None
        source: BatchSource
        if links.synthetic_inputs is not None:
            source = SyntheticInputs(step)
        elif links.replay:
            source = ReplayBuffer(links.replay, step.spec.seed)
        else:
            return None
        return cls(step, input, source, late=links.synthetic_inputs == "late")

    @property
    def count(self) -> int:
        """Batches trained on so far."""
        return self._source.replayed

    def heard(self) -> None:
        """Note that something has come from upstream."""
        self._heard_s = time.monotonic()

    def keep(self, xs: tuple[Tensor, ...], y_BY: Tensor) -> None:
        """Note a batch that the module has just been trained on."""
        self._source.keep(xs, y_BY)

    def train(self) -> bool:
        """Train on one batch, if it is time to; return whether it did."""
        if not self._late and not self._gone():
            return False
        chosen = self._source.choose()
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
