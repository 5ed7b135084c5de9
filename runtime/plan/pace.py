"""How long batches take where workers run, and how many replicas balance that."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from dni_runtime.errors import UsageError
from dni_runtime.run.documents.metrics import TRAIN, parse_train
from dni_runtime.run.lines import LineReader, offset_of_last
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.split.balance import SLACK

_LINES = 60
"""Newest lines of a worker's metrics that are looked at: each is of a second, or of one batch."""


def balance_of(
    run: RunDir, names: Sequence[str], elastic: Mapping[str, int], *, margin: float = 1.0
) -> dict[str, int]:
    """Return how many replicas balance a run's chain; see :func:`balancing_replicas`.

    ``elastic`` has the present numbers. A module loses replicas if the others would suffice for
    ``margin`` times its work. Raises ``UsageError`` if a module has measured nothing yet.
    """
    workers = replicas_of(names)
    if not elastic:
        raise UsageError(
            f"run {run.root.name!r} has no module whose number of replicas can change",
            hint="for the next run, write 'replicas: {start: .., most: ..}' in its chain",
        )
    present = {module: replicas[: elastic.get(module)] for module, replicas in workers.items()}
    measured = {module: worker_seconds(run, replicas) for module, replicas in present.items()}
    seconds = {module: mean_s for module, mean_s in measured.items() if mean_s is not None}
    if unknown := [module for module in workers if module not in seconds]:
        raise UsageError(
            f"{', '.join(unknown)}: not measured yet how long a batch takes",
            hint="try again after some seconds of training",
        )
    numbers = {module: len(replicas) for module, replicas in workers.items()}
    most = {module: numbers[module] for module in elastic}
    counts = balancing_replicas(seconds, numbers, most)
    for module, now in elastic.items():
        if counts[module] < now:
            more = balancing_replicas({**seconds, module: seconds[module] * margin}, numbers, most)
            counts[module] = min(now, more[module])
    return counts


def worker_seconds(run: RunDir, workers: Sequence[str]) -> float | None:
    """Return how long one of a module's workers computes for a batch; see :func:`batch_seconds`."""
    times = [seconds for worker in workers if (seconds := batch_seconds(run, worker)) is not None]
    return statistics.mean(times) if times else None


def batch_seconds(run: RunDir, module: str) -> float | None:
    """Return how long a module computes for a batch where it runs: the median of lately.

    That is the time without waiting for data, input, room, gradients or replicas.
    """
    path = run.metrics(module)
    offset = offset_of_last(path, _LINES, TRAIN)
    lines = deque(LineReader(path, parse_train, offset=offset).new(), _LINES)
    times = [
        max(1 - sum(line.waiting.values()), 0.0) / line.batches_per_s
        for line in lines
        if line.batches_per_s
    ]
    return statistics.median(times) if times else None


def balancing_replicas(
    seconds: Mapping[str, float], replicas: Mapping[str, int], most: Mapping[str, int]
) -> dict[str, int]:
    """Return the fewest replicas with which no elastic module slows the chain down (pure).

    A chain is as fast as its slowest module: one that cannot have more replicas, or an elastic one
    with all that it can have. Differences within ``SLACK`` count as none. ``seconds`` is one
    worker's time for a batch; ``most`` has the largest number of each elastic module.
    """
    slowest = max(time_s / most.get(name, replicas[name]) for name, time_s in seconds.items())
    return {
        name: min(max(math.ceil(seconds[name] / (slowest * SLACK)), 1), limit)
        for name, limit in most.items()
    }
