"""Modules that are updated in random order, not by every batch, and with predicted inputs.

Jaderberg et al. 2016, sec. 3.1: asynchronous updates (a module takes part in an update with some
probability only) and the complete unlock (synthetic inputs beside synthetic gradients). In one
process: every module needs the samples, which a run sends to the head alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.step import ModuleStep
from dni_runtime.core.training import module_seed, seeded
from dni_runtime.spec import TensorSpec, WorkerSpec


class InputPredictor(nn.Module):
    """Predicts a module's input from the chain's: one hidden layer with BatchNorm and ReLU."""

    def __init__(self, sample: TensorSpec, activation: TensorSpec, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(sample.shape), hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, math.prod(activation.shape)),
            nn.Unflatten(1, activation.shape),
        )
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)

    @torch.no_grad()
    def forward(self, x_BX: Tensor) -> Tensor:
        """The prediction."""
        prediction: Tensor = self.layers(x_BX)
        return prediction

    def learn(self, x_BX: Tensor, h_BH: Tensor) -> Tensor:
        """Train one step on the squared error; return its mean over all elements."""
        error = F.mse_loss(self.layers(x_BX), h_BH)
        self.optimizer.zero_grad(set_to_none=True)
        error.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
        self.optimizer.step()
        return error.detach()


class UnlockedChain:
    """Modules with synthesizers that are updated independently of each other.

    A module's update trains the synthesizer upstream by the gradient at the module's input, and the
    input model downstream by the module's activation.
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],  # head first; all but the tail want every true gradient
        *,
        probability: float = 1.0,  # of each module's update, for each batch
        inputs: bool = False,  # modules below the head take synthetic inputs
        hidden: int = 256,  # width of the input models
    ) -> None:
        seed = workers[0].seed
        # No module waits for another one: synthesizers learn as in the paper.
        own = [_bootstrapped(worker) for worker in workers[:-1]]
        self.steps = [ModuleStep(worker) for worker in (*own, workers[-1])]
        self.inputs: list[InputPredictor] = []
        if inputs:
            with seeded(module_seed(seed, len(workers))):
                self.inputs = [
                    InputPredictor(workers[0].inputs[0], worker.inputs[0], hidden)
                    for worker in workers[1:]
                ]
        self._probability = probability
        self._chance = torch.Generator().manual_seed(seed)
        self._id = 0

    def train_batch(self, x_BX: Tensor, y_BY: Tensor) -> None:
        """Train randomly chosen modules on one batch, in random order."""
        self._id += 1
        count = len(self.steps)
        order = torch.randperm(count, generator=self._chance).tolist()
        drawn = torch.rand(count, generator=self._chance)
        chosen = [index for index in order if drawn[index] < self._probability]
        if self.inputs:
            for index in chosen:
                given_BX = x_BX if index == 0 else self.inputs[index - 1](x_BX)
                h_BH = self.steps[index].forward(self._id, given_BX)
                if index + 1 < count:
                    self.inputs[index].learn(x_BX, h_BH)
                self._update(index, given_BX, y_BY)
            return
        given = [x_BX]
        for step in self.steps:
            given.append(step.forward(self._id, given[-1]))
        for index in chosen:
            self._update(index, given[index], y_BY)

    def _update(self, index: int, given_BX: Tensor, y_BY: Tensor) -> None:
        (g_BX,) = self.steps[index].update(y_BY) or (None,)
        upstream = self.steps[index - 1].interface if index else None
        if upstream is not None and g_BX is not None:
            upstream.learn(given_BX, y_BY, g_BX, measure=False)

    def end_epoch(self) -> None:
        """Step the schedules that count epochs."""
        for step in self.steps:
            step.optimization.end_epoch()

    def predict(self, x_BX: Tensor) -> Tensor:
        """Return the chain's output in eval mode, from real inputs all the way."""
        for step in self.steps:
            x_BX = step.evaluate(x_BX)
        return x_BX


def _bootstrapped(worker: WorkerSpec) -> WorkerSpec:
    edges = tuple(edge.model_copy(update={"bootstrapped": True}) for edge in worker.sources)
    return worker.model_copy(update={"sources": edges})
