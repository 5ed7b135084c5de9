"""The pace of a chain and its modules, with real workers, for a bounded time.

Start, warm-up and end do not count: figures are differences between two reports of each worker
(``metrics/MODULE.jsonl``), so that measuring does not disturb the run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dni_runtime.documents.metrics import TrainLine, parse_train, read_metrics
from dni_runtime.documents.state import RunState
from dni_runtime.errors import StoppedError, WorkerError
from dni_runtime.launch.host import Site
from dni_runtime.launch.journal import failure
from dni_runtime.launch.planning import plan_here
from dni_runtime.launch.prepare import Prepared, prepare_again
from dni_runtime.launch.processes import LocalStarter
from dni_runtime.launch.records import create_run
from dni_runtime.launch.restarts import RestartPlan
from dni_runtime.launch.start import Launch
from dni_runtime.launch.supervisor import Supervisor
from dni_runtime.lines import LineReader
from dni_runtime.rundir import RunDir
from dni_runtime.spec.replicas import tails_of

WAITS = ("input", "window", "gradient")
"""Reasons why a worker waits: a batch from upstream, room in its window, a true gradient."""

_ENDLESS = 1_000_000
_PATIENCE_S = 180.0


@dataclass(frozen=True)
class ModulePace:
    """Pace of one worker between two of its reports.

    Attributes:
        module: Its name.
        samples_per_s: Training samples per second.
        batch_s: Seconds from one training batch to the next.
        cpu_s: CPU seconds per batch, of all threads of the worker together.
        cores: Cores that it kept busy.
        waiting: Shares of the time that it waited, by reason (see ``WAITS``).
        lag: Batches by which true gradients came late, on average; None if none came.
    """

    module: str
    samples_per_s: float
    batch_s: float
    cpu_s: float
    cores: float
    waiting: dict[str, float]
    lag: float | None


@dataclass(frozen=True)
class ChainPace:
    """Pace of a chain in its steady state.

    Attributes:
        seconds: Duration of the measurement.
        batches: Training batches of the tail during that time.
        samples_per_s: Training samples per second at the tail.
        cores: Cores that all workers together kept busy.
        cpu_s: CPU seconds of all workers per sample.
        modules: The modules, head first.
    """

    seconds: float
    batches: int
    samples_per_s: float
    cores: float
    cpu_s: float
    modules: tuple[ModulePace, ...]


@dataclass(frozen=True)
class Bounds:
    """Duration of a measurement.

    Attributes:
        warmup_s: Seconds to leave out after the tail's first report; more if the links' windows
            have not been filled twice by then.
        seconds: Seconds to measure.
        batches: Number of batches at the tail after which to end earlier, or None.
    """

    warmup_s: float = 3.0
    seconds: float = 8.0
    batches: int | None = None


def endless(prepared: Prepared) -> Prepared:
    """Return the chain without end, evaluations, checkpoints and schedules: only training.

    Raises:
        SpecError: The result cannot be used.
    """
    chain = prepared.written
    no_schedule = {"schedule": None, "schedule_every": None}
    update = {
        "epochs": _ENDLESS,
        "steps": None,
        "eval_every": 0,
        "checkpoint": chain.checkpoint.model_copy(update={"every_epochs": 0, "every_steps": None}),
        "defaults": chain.defaults.model_copy(update=no_schedule),
        "modules": tuple(module.model_copy(update=no_schedule) for module in chain.modules),
    }
    return prepare_again(prepared, chain.model_copy(update=update))


def measure_chain(
    root: Path,
    prepared: Prepared,
    site: Site,
    bounds: Bounds,
    *,
    prefixes: Mapping[str, Sequence[str]] | None = None,
    observe: Callable[[RunState], None] | None = None,
) -> ChainPace:
    """Train a chain with real workers until its pace is known, then end it.

    Args:
        root: The run directory to make.
        prepared: The chain; see :func:`endless`.
        site: What this host offers.
        bounds: Duration.
        prefixes: By module, a command that executes the worker's command, such as ``nsenter``.
        observe: Called a few times a second with the run's state.

    Raises:
        WorkerError: A worker failed, or the chain is too slow to be measured.
        StoppedError: The run was stopped too early.
    """
    run = create_run(root, prepared, backend=site.backend)
    plan = plan_here(run.root, prepared.chain, prepared.workers, site, data=prepared.data)
    wrap = prefixes or {}
    plan = replace(
        plan,
        workers=tuple(
            replace(worker, prefix=tuple(wrap.get(worker.module, ()))) for worker in plan.workers
        ),
    )
    launch = Launch.of(run, replace(plan, restart=RestartPlan()))  # restarts would be measured
    supervisor = Supervisor(run, launch.plan, LocalStarter(), lease=launch.lease)
    tail = tails_of(prepared.names)[0]
    watch = Watch(run.metrics(tail), bounds, 2 * prepared.chain.links.window)

    def look(state: RunState) -> None:
        if observe is not None:
            observe(state)
        if state.active and watch.done():
            supervisor.interrupt(signal.SIGTERM)

    state = supervisor.run(look)
    error = failure(run, state)
    if error is not None:
        raise error
    if watch.end is None or watch.begin is None:
        raise StoppedError("the chain was stopped before its pace was known")
    return read_pace(run, prepared.names, watch.begin.time, watch.end.time)


class Watch:
    """Reader of the tail's reports; ``done`` returns True once, when enough is measured."""

    def __init__(self, path: Path, bounds: Bounds, fill: int) -> None:
        self._reader = LineReader(path, parse_train)
        self._bounds = bounds
        self._fill = fill
        self._patience = time.monotonic() + _PATIENCE_S + bounds.warmup_s + bounds.seconds
        self._first: TrainLine | None = None
        self.begin: TrainLine | None = None
        self.end: TrainLine | None = None

    def done(self) -> bool:
        if self.end is not None:
            return False
        for line in self._reader.new():
            if self._take(line):
                return True
        if time.monotonic() > self._patience:
            raise WorkerError(
                "the chain is too slow to be measured: the tail has reported "
                f"{'little' if self._first else 'nothing'} so far"
            )
        return False

    def _take(self, line: TrainLine) -> bool:
        bounds = self._bounds
        if self._first is None:
            self._first = line
        if self.begin is None:
            since_s = line.time - self._first.time
            filled = line.step - self._first.step >= self._fill
            if since_s >= bounds.warmup_s and filled:
                self.begin = line
            return False
        enough = bounds.batches is not None and line.step - self.begin.step >= bounds.batches
        if line.time - self.begin.time >= bounds.seconds or enough:
            self.end = line
        return self.end is not None


def read_pace(run: RunDir, modules: Sequence[str], since: float, until: float) -> ChainPace:
    """Return the chain's pace between two moments, from its run directory.

    Args:
        run: The run directory.
        modules: The modules, head first.
        since: Unix time of a report of the tail.
        until: Unix time of a later one.

    Raises:
        WorkerError: A module has not reported twice in between.
    """
    paces = []
    for module in modules:
        lines = list(read_metrics(run.metrics(module), TrainLine))
        # Each worker reports about once a second, but not at the same time as the others.
        first, last = (
            min(lines, key=lambda line: abs(line.time - moment), default=None)
            for moment in (since, until)
        )
        if first is None or last is None or last.step <= first.step:
            raise WorkerError(f"module {module!r} has reported too rarely: measure for longer")
        paces.append(module_pace(module, lines, first, last))
    tails = [pace for name, pace in zip(modules, paces, strict=True) if name in tails_of(modules)]
    samples_per_s = sum(pace.samples_per_s for pace in tails)
    cores = sum(pace.cores for pace in paces)
    return ChainPace(
        seconds=until - since,
        batches=round(sum((until - since) / pace.batch_s for pace in tails)),
        samples_per_s=samples_per_s,
        cores=cores,
        cpu_s=cores / samples_per_s,
        modules=tuple(paces),
    )


def module_pace(
    module: str, lines: Sequence[TrainLine], first: TrainLine, last: TrainLine
) -> ModulePace:
    """Return a worker's pace between two of its reports.

    Args:
        module: Its name.
        lines: All its reports.
        first: One of them.
        last: A later one.
    """
    seconds = last.time - first.time
    batches = last.step - first.step
    cpu_s = last.cpu_s - first.cpu_s
    lags = [
        line.lag for line in lines if first.time < line.time <= last.time and line.lag is not None
    ]
    waited = {
        reason: last.waiting_s.get(reason, 0.0) - first.waiting_s.get(reason, 0.0)
        for reason in WAITS
    }
    return ModulePace(
        module=module,
        samples_per_s=(last.samples - first.samples) / seconds,
        batch_s=seconds / batches,
        cpu_s=cpu_s / batches,
        cores=cpu_s / seconds,
        waiting={reason: value / seconds for reason, value in waited.items()},
        lag=sum(lags) / len(lags) if lags else None,
    )
