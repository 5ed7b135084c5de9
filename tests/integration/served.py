"""A module's server in this process, with all that it needs beside its links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from dni_runtime.core.step import ModuleStep
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.checkpoint import CheckpointWriter
from dni_runtime.worker.ledger import Ledger, ModuleProgress
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.server import ModuleServer
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.stream import Item


@dataclass
class Worker:
    """What a module's server needs."""

    step: ModuleStep
    stop: StopRequest
    ledger: Ledger
    checkpoints: CheckpointWriter
    metrics: MetricsWriter
    start: Start

    def server(self, **ends: Any) -> ModuleServer:
        return ModuleServer(**vars(self), **ends)


class Listed:
    """Items for a head that come from no data set; they end when they end."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self.takes = True
        self.samples: list[int | None] = []

    def __next__(self) -> Item:
        return next(self._items)

    def end(self) -> None:
        raise AssertionError("nothing asks for an early end")

    def close(self) -> None:
        pass


@contextmanager
def worker_of(
    run: RunDir,
    spec: WorkerSpec,
    *,
    begun: tuple[Start, Ledger] | None = None,
    step: ModuleStep | None = None,
) -> Iterator[Worker]:
    """Make a worker, and close its files; by default it begins with the run."""
    start, ledger = begun or (Start(), Ledger(run.ledger(spec.module), ModuleProgress()))
    with (
        closing(StopRequest()) as stop,
        closing(ledger),
        closing(CheckpointWriter(run, spec.module, [spec.module], 2, pytest.fail)) as writer,
    ):
        metrics = MetricsWriter(run, spec, 1, progress=ledger.progress)
        yield Worker(step or ModuleStep(spec), stop, ledger, writer, metrics, start)
