"""What a worker measures: lines of metrics (``worker/report.py``), and its report.

It is one file because it is one class: both are of the same counters.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from dni_runtime.core.counters import Mean, StepCounters
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import CheckpointError, DniError
from dni_runtime.link import LinkCounters
from dni_runtime.run.documents.figures import figures_of
from dni_runtime.run.documents.metrics import (
    EpochLine,
    Evaluation,
    EvaluationLine,
    MetricsLine,
    StartLine,
    TrainingFigures,
    TrainLine,
)
from dni_runtime.run.documents.reports import ChainStart, DivergedValue, Report, WorkerPhase
from dni_runtime.run.documents.state import process_birth
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.device import Copies, HostCopy
from dni_runtime.worker.exchange import Exchange
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join
from dni_runtime.worker.ledger import ModuleProgress
from dni_runtime.worker.report import MetricsFile, ReportWriter

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Approximate seconds between two lines of metrics."""

SAMPLE_S = 0.25
"""Seconds between measurements that cost passes over activations."""

COUNTERS = tuple(figure.name for figure in figures_of(TrainingFigures) if figure.kind == "counter")


def link_figures(
    input: Join | None, output: Fanout | None, exchange: Exchange | None, replayed: int
) -> dict[str, Any]:
    """Return those figures of a line that are of the worker's links."""
    up = LinkCounters() if input is None else input.counters
    down = LinkCounters() if output is None else output.counters
    beside = LinkCounters() if exchange is None else exchange.counters
    return {
        "in_flight": 0 if output is None or not output.links else output.fullest.in_flight,
        "gradients_dropped": up.gradients_dropped,
        "refused": dict(up.refused + beside.refused),
        "missed": down.missed,
        "replayed": replayed,
        "resent": down.resent,
        "duplicates": up.duplicates,
        "gaps": up.gaps,
        "shared_bytes": None if exchange is None else exchange.sent,
    }


@dataclass
class MetricsWriter:
    """Writes a module's metrics about once a second, and composes its report."""

    run: RunDir
    spec: WorkerSpec
    attempt: int
    began: float = field(default_factory=time.time)  # Unix time of the program's start
    # Unix time at which the module had its state and its address
    loaded_at: float = field(init=False)
    progress: ModuleProgress = field(
        default_factory=ModuleProgress
    )  # its ledger's, as soon as there is one
    # by reason: data (the head's source), input, window, gradient, replicas
    waiting_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    state: WorkerPhase = "starting"
    # what the computing thread does or waits for (supervise/stall.py explains the words)
    doing: str = "start"
    error: str | None = None  # that ended it
    warning: str | None = None  # the newest problem that did not end it
    diverged: DivergedValue | None = None  # what was not finite; see worker/divergence.py
    # bytes that it has saved while it saves its state, else None
    saving: Callable[[], int | None] = lambda: None
    chain_start: ChainStart | None = None  # for the report
    report: ReportWriter = field(init=False)

    def __post_init__(self) -> None:
        self._imported_at = self.loaded_at = time.time()
        self._due = time.monotonic() + INTERVAL_S
        self._sample_due = 0.0
        self._born = process_birth(os.getpid())
        self._doing_since_s = time.monotonic()
        self._link: tuple[bool | None, int] = None, 0
        path, name = self.run.worker(self.spec.module), self.spec.module
        # Counters go on where the module's former attempt was.
        self._former = Report.read(path).train or TrainLine(kind="train")
        self.report = ReportWriter(path, name, self.attempt, self._report, self._complain)
        self._complained = False
        self._exit_code: int | None = None
        self._replayed = 0
        self._file = MetricsFile(self.run.metrics(name))
        self._first: TrainLine | None = None
        self._newest: TrainLine | None = None
        self._lines: deque[tuple[MetricsLine, _Means | None]] = deque()
        self._loss = Mean()
        self._fill, self._fills = 0.0, 0
        self._evaluation: Evaluation | None = None
        self._last = self._reading(StepCounters())

    def warn(self, error: CheckpointError | str) -> None:
        """Report a problem, such as a checkpoint that could not be written."""
        log.warning("%s", error)
        self.warning = str(error)

    def all_is_well(self) -> None:
        """Withdraw the warning: a checkpoint could be written (again)."""
        self.warning = None

    def started(self) -> None:
        """Write one line about the start, and measure rates and shares from here on."""
        self._last = self._reading(StepCounters())
        line = StartLine(
            **self._head(),
            kind="start",
            began=self.began,
            import_s=round(self._imported_at - self.began, 4),
            load_s=round(self.loaded_at - self._imported_at, 4),
            connect_s=round(time.time() - self.loaded_at, 4),
        )
        self._append(line)

    def set_state(self, state: WorkerPhase, error: BaseException | None = None) -> None:
        """Report a state; ``StoppedError`` if a later attempt of the module has taken over."""
        self.state, self.error = state, None if error is None else str(error)
        self._exit_code = getattr(error, "exit_code", DniError.exit_code) if error else None
        self.report.write()
        self.report.check()

    def now(self, doing: str) -> None:
        """Note what the computing thread begins to do or to wait for."""
        self.doing, self._doing_since_s = doing, time.monotonic()

    def count_loss(self, loss: Tensor | None) -> None:
        """Add a batch's loss to the interval's mean (without waiting for a device)."""
        if loss is not None:
            self._loss.add(loss)

    def count_window(self, in_flight: int, window: int) -> None:
        """Add to the interval's mean how much of the window is in use.

        ``in_flight`` includes the message just sent, and markers, which may exceed the window.
        """
        self._fill += min(in_flight / window, 1.0)
        self._fills += 1

    def due(self, step: ModuleStep) -> bool:
        """Ask the module for measurements if they are due; return whether a line is due."""
        self.flush(wait=False)
        now = time.monotonic()
        if now >= self._sample_due:
            self._sample_due = now + SAMPLE_S
            step.measure_late = step.measure_head = True
        return self.interval_over

    @property
    def interval_over(self) -> bool:
        """Whether figures are due."""
        return time.monotonic() >= self._due

    def write(
        self, step: ModuleStep, links: Mapping[str, Any], connected: bool | None, copies: Copies
    ) -> None:
        """Write one line about training, as soon as its means have been computed.

        ``links``: see :func:`link_figures`; ``connected``: all links downstream; None for the tail.
        ``copies`` fetches the means from the module's device, without waiting for it. Raises
        ``StoppedError`` if a later attempt of the module has taken over.
        """
        self._link = connected, links["in_flight"]
        progress, counters, then = self.progress, step.counters, self._last
        if progress.step > then.step or links["replayed"] > self._replayed:
            self._replayed = links["replayed"]
            means = {
                "loss": self._loss.take(),
                "head_accuracy": counters.head_accuracy.take(),
                "synthesizer_error": counters.error.take(),
                "synthesizer_cosine": counters.cosine.take(),
            }
            line, now = self._measure(counters, links), self._last
            paired, given_up = now.paired - then.paired, now.given_up - then.given_up
            of_step = dict[str, Any](
                **dict.fromkeys(means),
                compute_s=None,
                lag=round((now.lag - then.lag) / paired, 3) if paired else None,
                lag_max=counters.lag_max if paired else None,
                gradients_lost=_share(given_up, given_up + paired),
                gradients=counters.gradients,
                gradients_unpaired=counters.unpaired,
                gradients_given_up=counters.given_up,
                gradients_skipped=counters.skipped,
                updates_skipped=step.optimization.skipped,
                window_fill=_share(self._fill, self._fills),
            )
            line = line.model_copy(update=of_step)
            self._append(_since(self._former, line), _Means.of(means, copies))
            counters.lag_max, self._fill, self._fills = 0, 0.0, 0
        self._due = time.monotonic() + INTERVAL_S
        self.report.check()

    def predicted(self, links: Mapping[str, Any], connected: bool) -> None:
        """Put figures of a module that only predicts into its report: it may serve for years."""
        self._link, then = (connected, links["in_flight"]), self._last
        line, batches = self._measure(StepCounters(), links), self.progress.step - then.step
        busy = max(1 - sum(line.waiting.values()), 0.0) * line.interval_s
        figures = {"compute_s": round(busy / batches, 6) if batches else None}
        self._newest = _since(self._former, line.model_copy(update=figures))
        self._first = self._first or self._newest
        self._due = time.monotonic() + INTERVAL_S
        self.report.check()

    def _measure(self, counters: StepCounters, links: Mapping[str, Any]) -> TrainLine:
        """Return what any worker has measured since the last reading."""
        then, now = self._last, self._reading(counters)
        self._last, took = now, max(now.time_s - then.time_s, 1e-9)
        return TrainLine(
            **self._head(),
            kind="train",
            interval_s=round(took, 4),
            batches_per_s=round((now.step - then.step) / took, 3),
            samples_per_s=round((now.samples - then.samples) / took, 3),
            **links,
            waiting={
                reason: round((value - then.waiting_s.get(reason, 0.0)) / took, 4)
                for reason, value in now.waiting_s.items()
            },
            waiting_s={reason: round(value, 4) for reason, value in now.waiting_s.items()},
            cpu_s=round(now.cpu_s, 4),
            cpu=round((now.cpu_s - then.cpu_s) / took, 3),
            **_memory(),
        )

    def epoch_ended(self, epoch: int, batches: int) -> None:
        """Write one line about a training epoch: its batches, each counted once."""
        self._append(EpochLine(**self._head() | {"epoch": epoch}, kind="epoch", batches=batches))

    def evaluated(
        self, result: dict[str, float], samples: int, *, step: int, test: bool = False
    ) -> None:
        """Write one line about an evaluation, of the chain (tail) or of an early head.

        ``step`` is the number of training batches until then, of all replicas of the tail;
        ``test``: it was of the test set.
        """
        kind: Literal["eval", "test"] = "test" if test else "eval"
        figures: dict[str, Any] = {key: _finite(value) for key, value in result.items()}
        head = self._head() | {"samples": samples, "step": step}
        line = EvaluationLine(**head, kind=kind, **figures)
        self._append(line)
        if not test:
            self._evaluation = Evaluation(epoch=line.epoch, step=line.step, **figures)

    def _reading(self, counters: StepCounters) -> _Reading:
        return _Reading(
            time_s=time.monotonic(),
            cpu_s=time.process_time(),
            step=self.progress.step,
            samples=self.progress.samples,
            paired=counters.gradients - counters.unpaired,
            given_up=counters.given_up,
            lag=counters.lag,
            waiting_s=dict(self.waiting_s),
        )

    def _position(self) -> dict[str, int]:
        at = self.progress
        return {"id": at.id, "epoch": at.epoch, "step": at.step, "samples": at.samples}

    def _head(self) -> dict[str, Any]:
        head = {"time": time.time(), "module": self.spec.module, "attempt": self.attempt}
        return head | self._position()

    def _append(self, line: MetricsLine, means: _Means | None = None) -> None:
        self._lines.append((line, means))
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Append lines to the file, in their order.

        Without ``wait`` only those whose means have come from the device.
        """
        while self._lines and (wait or (means := self._lines[0][1]) is None or means.fetched.here):
            line, means = self._lines.popleft()
            line = line if means is None else line.model_copy(update=means.values())
            if isinstance(line, TrainLine):
                self._first, self._newest = self._first or line, line
            try:
                self._file.append(line)
            except OSError as error:
                self._complain(error)

    def _complain(self, error: OSError) -> None:
        """Warn once that the disk is full or unavailable; training continues."""
        if not self._complained:
            self._complained = True
            log.warning("the run directory cannot be written: %s", error)

    def _report(self) -> Report:
        return Report(
            module=self.spec.module,
            attempt=self.attempt,
            pid=os.getpid(),
            born=self._born,
            host=socket.gethostname(),
            state=self.state,
            time=time.time(),
            **self._position(),
            doing=self.doing,
            doing_s=round(time.monotonic() - self._doing_since_s, 1),
            saving=self.saving(),
            connected=self._link[0],
            in_flight=self._link[1],
            evaluation=self._evaluation,
            train=self._newest,
            batches_per_s=self._rate("step"),
            samples_per_s=self._rate("samples"),
            error=self.error,
            exit_code=self._exit_code,
            warning=self.warning,
            diverged=self.diverged,
            chain_start=self.chain_start,
        )

    def _rate(self, counter: Literal["step", "samples"]) -> float | None:
        """Return the growth of a counter per second since the attempt's first line."""
        first, last = self._first, self._newest
        if first is None or last is None:
            return None
        if last.time <= first.time:  # the only one so far
            return last.batches_per_s if counter == "step" else last.samples_per_s
        grown: int = getattr(last, counter) - getattr(first, counter)
        return round(grown / (last.time - first.time), 3)


def _since(former: TrainLine, line: TrainLine) -> TrainLine:
    """Return a line with the counters of a former attempt added."""
    sums = {name: _sum(getattr(former, name), getattr(line, name)) for name in COUNTERS}
    return line.model_copy(update=sums)


def _sum(former: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {key: _sum(former.get(key), now.get(key)) for key in former | now}
    return now if former is None else round(former + (now or 0), 4)


class _Means(NamedTuple):
    """Those values of a line that a device may still be computing."""

    names: tuple[str, ...]
    fetched: HostCopy

    @classmethod
    def of(cls, means: dict[str, Tensor | None], copies: Copies) -> Self | None:
        known = {name: mean for name, mean in means.items() if mean is not None}
        return cls(tuple(known), copies.to_host(torch.stack([*known.values()]))) if known else None

    def values(self) -> dict[str, float | None]:
        return dict(zip(self.names, map(_finite, self.fetched.wait().tolist()), strict=True))


class _Reading(NamedTuple):
    """Counters at one time; lines contain differences of two readings."""

    time_s: float
    cpu_s: float
    step: int
    samples: int
    paired: int
    given_up: int
    lag: int
    waiting_s: dict[str, float]


def _memory() -> dict[str, Any]:
    """Return the resident memory of this process, proc_pid_statm(5), and its peak, getrusage(2)."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:  # /proc is hidden
        return {"memory_peak_bytes": peak_bytes}
    now_bytes = pages * resource.getpagesize()
    # The kernel updates the two at different times.
    return {"memory_bytes": now_bytes, "memory_peak_bytes": max(peak_bytes, now_bytes)}


def _share(part: float, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _finite(value: float | None) -> float | None:
    """Return a rounded figure; None (null) if it is NaN, which JSON lacks."""
    return round(value, 6) if value is not None and math.isfinite(value) else None
