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
    present = {module: own[: elastic.get(module)] for module, own in workers.items()}
    measured = {module: worker_seconds(run, own) for module, own in present.items()}
    seconds = {module: own for module, own in measured.items() if own is not None}
    if unknown := [module for module in workers if module not in seconds]:
        raise UsageError(
            f"{', '.join(unknown)}: not measured yet how long a batch takes",
            hint="try again after some seconds of training",
        )
    numbers = {module: len(own) for module, own in workers.items()}
    most = {one: numbers[one] for one in elastic}
    found = balancing_replicas(seconds, numbers, most)
    for one, now in elastic.items():
        if found[one] < now:
            more = balancing_replicas({**seconds, one: seconds[one] * margin}, numbers, most)
            found[one] = min(now, more[one])
    return found


def worker_seconds(run: RunDir, workers: Sequence[str]) -> float | None:
    """Return how long one of a module's workers computes for a batch; see :func:`batch_seconds`."""
    found = [seconds for one in workers if (seconds := batch_seconds(run, one)) is not None]
    return statistics.mean(found) if found else None


def batch_seconds(run: RunDir, module: str) -> float | None:
    """Return how long a module computes for a batch where it runs: the median of lately.

    That is the time without waiting for data, input, room, gradients or replicas.
    """
    path = run.metrics(module)
    offset = offset_of_last(path, _LINES, TRAIN)
    lines = deque(LineReader(path, parse_train, offset=offset).new(), _LINES)
    found = [
        max(1 - sum(line.waiting.values()), 0.0) / line.batches_per_s
        for line in lines
        if line.batches_per_s
    ]
    return statistics.median(found) if found else None


def balancing_replicas(
    seconds: Mapping[str, float], replicas: Mapping[str, int], most: Mapping[str, int]
) -> dict[str, int]:
    """Return the fewest replicas with which no elastic module slows the chain down (pure).

    A chain is as fast as its slowest module: one that cannot have more replicas, or an elastic one
    with all that it can have. Differences within ``SLACK`` count as none. ``seconds`` is one
    worker's time for a batch; ``most`` has the largest number of each elastic module.
    """
    slowest = max(own / most.get(name, replicas[name]) for name, own in seconds.items())
    return {
        name: min(max(math.ceil(seconds[name] / (slowest * SLACK)), 1), limit)
        for name, limit in most.items()
    }
