"""Plain backprop of a chain's network in one process, for a bounded time; see ``launch.reference``.

It runs this module as a program in a separate process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from dni_runtime.bench.chain import Bounds
from dni_runtime.data import Batch, DataSource
from dni_runtime.launch.records import Record
from dni_runtime.launch.reference import in_new_process, opened


@dataclass(frozen=True)
class ReferencePace:
    """Plain backprop in its steady state.

    Attributes:
        seconds: Duration of the measurement.
        batches: Training batches during that time.
        samples_per_s: Training samples per second.
        cores: Cores that it kept busy.
        cpu_s: CPU seconds per sample.
    """

    seconds: float
    batches: int
    samples_per_s: float
    cores: float
    cpu_s: float


def measure_reference(record: Record, threads: int, bounds: Bounds) -> ReferencePace:
    """Train a run's network in a new process until its pace is known.

    Args:
        record: A run directory made for it.
        threads: Number of compute threads.
        bounds: Duration.

    Raises:
        WorkerError: The process failed.
    """
    arguments = [str(record.run.root), str(threads), json.dumps(asdict(bounds))]
    answer = in_new_process(record, ["dni_runtime.bench.reference", *arguments])
    return ReferencePace(**json.loads(answer))


def time_reference(record: Record, threads: int, bounds: Bounds) -> ReferencePace:
    """Train the concatenated network on the same batches."""
    with opened(record, threads) as (_, _, model, source):
        batches = _endless(source)
        until = time.perf_counter() + bounds.warmup_s
        loss = model.train_batch(*next(batches))
        while time.perf_counter() < until:
            loss = model.train_batch(*next(batches))
        float(loss)  # waits for the device
        began, cpu_s, done, samples = time.perf_counter(), time.process_time(), 0, 0
        while True:
            x, y_BY = next(batches)
            loss = model.train_batch(x, y_BY)
            done += 1
            samples += len(y_BY)
            if time.perf_counter() - began >= bounds.seconds or done == bounds.batches:
                break
        float(loss)
        seconds = time.perf_counter() - began
        cpu_s = time.process_time() - cpu_s
    return ReferencePace(seconds, done, samples / seconds, cpu_s / seconds, cpu_s / samples)


def _endless(source: DataSource) -> Iterator[Batch]:
    for epoch in count(1):
        yield from source.train_batches(epoch)


if __name__ == "__main__":
    _, root, threads, text = sys.argv
    pace = time_reference(Record.read(Path(root)), int(threads), Bounds(**json.loads(text)))
    print(json.dumps(asdict(pace)))
