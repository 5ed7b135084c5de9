"""What a worker measures, as JSON lines, and the state that it shows to the outside."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dni_runtime.core.step import ModuleStep
from dni_runtime.core.training import METRICS
from dni_runtime.rundir import RunDir, append_line, write_json
from dni_runtime.spec import WorkerSpec

INTERVAL_S = 1.0


@dataclass
class Progress:
    """How far a worker is.

    Attributes:
        id: Position in the stream.
        epoch: The newest epoch.
        step: Training batches so far.
        samples: Training samples so far.
    """

    id: int = 0
    epoch: int = 0
    step: int = 0
    samples: int = 0


@dataclass
class Meter:
    """Writes a module's metrics about once a second and its state when it changes.

    Attributes:
        run: The run directory.
        spec: The module.
        attempt: Which start of the module this is.
        progress: Kept up to date by the server.
        waiting_s: Seconds spent waiting, by reason.
    """

    run: RunDir
    spec: WorkerSpec
    attempt: int
    progress: Progress = field(default_factory=Progress)
    waiting_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    state: str = "starting"
    error: str | None = None

    def __post_init__(self) -> None:
        self._due = time.monotonic() + INTERVAL_S
        self._last = (time.monotonic(), 0, 0)
        self._loss_sum: Tensor | None = None
        self._loss_count = 0
        self._gradients = (0, 0)

    def start_from_here(self) -> None:
        """Measure rates from the present progress on (after a checkpoint was loaded)."""
        self._last = (time.monotonic(), self.progress.step, self.progress.samples)

    def set_state(self, state: str, error: str | None = None) -> None:
        """Show a state: starting, connecting, running, stopping, finished, stopped or failed."""
        self.state, self.error = state, error
        self._write_state()

    def count_loss(self, loss: Tensor | None) -> None:
        """Add a batch's loss to the interval's mean (without waiting for a device)."""
        if loss is not None:
            self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
            self._loss_count += 1

    @property
    def due(self) -> bool:
        """Whether a line is due."""
        return time.monotonic() >= self._due

    def write(self, step: ModuleStep, link: dict[str, Any]) -> None:
        """Write one line about training, and the state.

        Args:
            step: The module.
            link: What the links counted.
        """
        now = time.monotonic()
        then, steps, samples = self._last
        progress, counters = self.progress, step.counters
        if progress.step > steps:
            took = max(now - then, 1e-9)
            gradients, lag = counters.gradients - self._gradients[0], counters.lag
            late = counters.late
            self._append(
                kind="train",
                id=progress.id,
                epoch=progress.epoch,
                step=progress.step,
                samples=progress.samples,
                batches_per_s=round((progress.step - steps) / took, 3),
                samples_per_s=round((progress.samples - samples) / took, 3),
                loss=_finite(float(self._loss_sum) / self._loss_count)
                if self._loss_sum is not None
                else None,
                lag=round((lag - self._gradients[1]) / gradients, 3) if gradients else None,
                synthesizer_error=_finite(float(late.error)) if late else None,
                synthesizer_cosine=_finite(float(late.cosine)) if late else None,
                gradients=counters.gradients,
                gradients_unpaired=counters.unpaired,
                cpu_s=round(time.process_time(), 4),
                waiting_s={key: round(value, 4) for key, value in self.waiting_s.items()},
                **link,
            )
            step.measure_late = True
            self._gradients = (counters.gradients, lag)
            self._last = (now, progress.step, progress.samples)
            self._loss_sum, self._loss_count = None, 0
        self._due = now + INTERVAL_S
        self._write_state()

    def evaluated(self, result: dict[str, float], samples: int) -> None:
        """Write one line about an evaluation of the whole chain (the tail's)."""
        progress = self.progress
        self._append(
            kind="eval",
            id=progress.id,
            epoch=progress.epoch,
            step=progress.step,
            samples=samples,
            **{key: _finite(value) for key, value in result.items()},
        )

    def _append(self, **values: Any) -> None:
        head = {"time": time.time(), "module": self.spec.module, "attempt": self.attempt}
        append_line(self.run.metrics(self.spec.module), head | values)

    def _write_state(self) -> None:
        progress = self.progress
        write_json(
            self.run.worker(self.spec.module),
            {
                "module": self.spec.module,
                "attempt": self.attempt,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "state": self.state,
                "time": time.time(),
                "id": progress.id,
                "epoch": progress.epoch,
                "step": progress.step,
                "samples": progress.samples,
                "error": self.error,
            },
        )


class Evaluation:
    """Sums of the tail's loss and metrics over one evaluation.

    Args:
        loss: The chain's loss.
        metrics: Names of the metrics.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], metrics: tuple[str, ...]) -> None:
        self._functions = {"loss": loss, **{name: METRICS[name] for name in metrics}}
        self.samples = 0
        self._sums = dict.fromkeys(self._functions, 0.0)

    def add(self, p_BP: Tensor, y_BY: Tensor) -> None:
        """Count one batch of predictions."""
        with torch.no_grad():
            for name, function in self._functions.items():
                self._sums[name] += float(function(p_BP, y_BY)) * len(p_BP)
        self.samples += len(p_BP)

    def result(self) -> dict[str, float]:
        """Means over all samples."""
        return {name: total / max(self.samples, 1) for name, total in self._sums.items()}


def _finite(value: float) -> float | None:
    """JSON has no NaN: a diverged figure is null."""
    return round(value, 6) if math.isfinite(value) else None
