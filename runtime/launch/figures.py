"""Measurements of a run's workers, read from its directory: the figures of ``status``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dni_runtime.launch.records import Record
from dni_runtime.launch.schedulers import read_state
from dni_runtime.launch.slurm.job import JobRecord
from dni_runtime.launch.state import RunState
from dni_runtime.lines import LineReader, last_line, offset_of_last, offset_where
from dni_runtime.reports import Report, WorkerPhase
from dni_runtime.rundir import RunDir
from dni_runtime.worker.metrics_file import TRAIN

EVALUATIONS = 1000
"""Most evaluations shown; earlier ones are in the tail's metrics file."""

_EVALUATION = b'"kind":"eval"'
_NEWEST_BYTES, _SEARCHED_BYTES = 1 << 18, 1 << 26  # of months, as workers write them
_LINK_COUNTS = ("missed", "replayed", "resent", "duplicates", "gaps")


@dataclass(frozen=True)
class ModuleFigures:
    """Figures of one module; None if unknown or not applicable.

    "Lately" is the interval of the newest line of metrics (docs/metrics.md): about a second, or one
    batch if that takes longer.

    Attributes:
        module: Its name.
        state: Its worker's phase.
        attempt: Number of this start of the module.
        restarts: Number of its restarts in this attempt of the run.
        pid: Its worker's process id.
        host: Its worker's host.
        epoch: The newest epoch it has seen.
        step: Training batches so far.
        samples: Training samples so far.
        batches_per_s: Training batches per second, lately.
        samples_per_s: Training samples per second, lately.
        loss: Mean training loss lately: the tail's, or an early head's.
        head_loss: Loss of the early head in the newest evaluation.
        head_accuracy: Accuracy of the early head in the newest evaluation.
        head_train_accuracy: Accuracy of the early head on training batches, lately.
        synthesizer_error: Error of the synthesizer, relative to the true gradient, lately.
        synthesizer_cosine: Cosine between predicted and true gradient, lately.
        lag: Mean delay of true gradients in batches, lately.
        lag_max: Largest delay of a true gradient in batches, lately.
        gradients_lost: Share of true gradients that came too late or never, lately.
        window: Most batches in flight to the next module.
        window_fill: Mean share of the window in use, lately.
        in_flight: Batches in flight to the next module, while it runs.
        waiting: Share of the time spent waiting, by reason, lately.
        cpu: CPU time per wall time, lately.
        memory_bytes: Resident memory.
        memory_peak_bytes: Peak resident memory.
        refused: Messages refused, by reason.
        missed: Batches not sent on, because the module downstream was gone.
        replayed: Batches trained on again, because the module upstream was gone.
        resent: Messages sent again to a restarted module.
        duplicates: Messages received more than once.
        gaps: Ids that never arrived.
        exit_code: Exit code of the worker.
        signal: Name of the signal that killed it.
        error: The worker's last error.
        warning: Problem that did not stop the worker, such as a checkpoint that cannot be written.
        diverged: Non-finite value (NaN or infinite), its batch and count; or None.
        log: Its log file.
    """

    module: str
    state: WorkerPhase
    attempt: int
    restarts: int = 0
    pid: int | None = None
    host: str | None = None
    epoch: int | None = None
    step: int | None = None
    samples: int | None = None
    batches_per_s: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    head_loss: float | None = None
    head_accuracy: float | None = None
    head_train_accuracy: float | None = None
    synthesizer_error: float | None = None
    synthesizer_cosine: float | None = None
    lag: float | None = None
    lag_max: int | None = None
    gradients_lost: float | None = None
    window: int | None = None
    window_fill: float | None = None
    in_flight: int | None = None
    waiting: dict[str, float] = field(default_factory=dict)
    cpu: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    refused: dict[str, int] = field(default_factory=dict)
    missed: int | None = None
    replayed: int | None = None
    resent: int | None = None
    duplicates: int | None = None
    gaps: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    error: str | None = None
    warning: str | None = None
    diverged: dict[str, Any] | None = None
    log: str | None = None


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run.

    Attributes:
        run: The run's name.
        path: Its directory.
        chain: The chain's name.
        backend: Backend of its workers.
        state: Phase of the run.
        attempt: Number of this start of the run.
        created: Unix time of its creation.
        started: Unix time of this attempt's start, or None.
        ended: Unix time of the end, or None.
        exit_code: Exit code of the run.
        error: Error message, or None.
        epoch: Epochs evaluated, or the tail's epoch before the first evaluation.
        epochs: Epochs requested.
        step: Training batches completed by the tail.
        total_steps: Training batches of the whole run, if known.
        accuracy: Accuracy of the last evaluation.
        loss: Loss of the last evaluation.
        evaluations: The last evaluations (up to ``EVALUATIONS``): epoch, step, loss, metrics.
        samples_per_s: Training samples per second at the tail, from the attempt's first to its
            last measurement.
        eta_s: Seconds left, at the pace of this attempt.
        modules: The modules, head first.
        job: Its Slurm job, or None.
        test: The evaluation of the test set, as in ``evaluations``; None before or without it.
    """

    run: str
    path: str
    chain: str
    backend: str
    state: str
    attempt: int
    created: float
    started: float | None
    ended: float | None
    exit_code: int | None
    error: str | None
    epoch: int | None
    epochs: int
    step: int | None
    total_steps: int | None
    accuracy: float | None
    loss: float | None
    evaluations: tuple[dict[str, Any], ...]
    samples_per_s: float | None
    eta_s: float | None
    modules: tuple[ModuleFigures, ...]
    job: str | None = None
    test: dict[str, Any] | None = None


def newest_train(run: RunDir, module: str) -> dict[str, Any] | None:
    """Return the newest line about a module's training; None if none is near its file's end."""
    paths = (run.metrics(module), run.recent_metrics(module))
    found = [last_line(path, TRAIN, within=_NEWEST_BYTES) for path in paths]
    return max((line for line in found if line), key=lambda line: line["time"], default=None)


class MetricsReader:
    """Reads the figures of one run; :meth:`read` is cheap enough to be called every second.

    Metrics files are read from their end: a run of months costs no more than one of minutes.

    Args:
        record: The run.
        evaluations: Number of last evaluations to read.
    """

    def __init__(self, record: Record, *, evaluations: int = EVALUATIONS) -> None:
        self._record = record
        self._most = evaluations
        self._lines: LineReader | None = None
        self._train: dict[str, dict[str, Any]] = {}
        self._kept: dict[str, dict[str, int]] = {}
        self._first: dict[str, Any] | None = None
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._test: dict[str, Any] | None = None

    def read(self, state: RunState | None = None) -> RunFigures:
        """Return the current figures.

        Args:
            state: The run's state, if the caller has it.
        """
        record = self._record
        state = state or read_state(record.run)
        job = JobRecord.read(record.run)
        tail = record.modules[-1]
        for name in record.modules:
            self._follow(name, state, is_tail=name == tail)
        modules = tuple(self._module(name, state) for name in record.modules)
        evaluations = tuple(self._evaluations[key] for key in sorted(self._evaluations))
        last = evaluations[-1] if evaluations else {}
        return RunFigures(
            run=record.name,
            path=str(record.run.root),
            chain=record.chain,
            backend=state.backend or record.backend,
            job=job.job if job is not None else None,
            state=state.phase,
            attempt=state.attempt,
            created=record.created,
            started=state.started or None,
            ended=state.ended,
            exit_code=state.exit_code,
            error=state.error,
            epoch=last.get("epoch", modules[-1].epoch),
            epochs=record.epochs,
            step=modules[-1].step,
            total_steps=record.total_steps,
            accuracy=last.get("accuracy"),
            loss=last.get("loss"),
            evaluations=evaluations,
            test=self._test,
            samples_per_s=self._pace("samples"),
            eta_s=self._eta(state, modules[-1].step),
            modules=modules,
        )

    def _follow(self, name: str, state: RunState, *, is_tail: bool) -> None:
        """Read a module's newest line; ignore earlier attempts of the run."""
        since = state.attempt
        if is_tail:  # others report their early heads
            for line in self._news(name):
                if line.get("kind") in ("eval", "test"):
                    self._evaluated(line)
        newest = newest_train(self._record.run, name)
        if newest is None or newest.get("attempt", 0) < since:
            return
        last = self._train.get(name)
        if last is None or last["attempt"] != newest["attempt"]:
            self._kept[name] = self._former_counts(name, since, newest["attempt"])
        self._train[name] = newest
        if is_tail and (self._first is None or self._first["attempt"] < since):
            self._first = self._first_train(name, since) or newest

    def _news(self, tail: str) -> Iterator[dict[str, Any]]:
        """Return the tail's new lines except those about training; first the last evaluations."""
        if self._lines is None:
            path = self._record.run.metrics(tail)
            offset = offset_of_last(path, self._most, _EVALUATION, within=_SEARCHED_BYTES)
            self._lines = LineReader(path, offset=offset, without=TRAIN)
        return self._lines.new()

    def _first_train(self, name: str, since: int) -> dict[str, Any] | None:
        path = self._record.run.metrics(name)
        offset = offset_where(path, partial(_of_start, since))
        lines = LineReader(path, offset=offset).new()
        return next((line for line in lines if line.get("kind") == "train"), None)

    def _former_counts(self, name: str, since: int, attempt: int) -> dict[str, int]:
        """Return the sums of counters over earlier attempts: each attempt resets them."""
        kept = dict.fromkeys(_LINK_COUNTS, 0)
        path = self._record.run.metrics(name)
        while attempt > since:
            begins = offset_where(path, partial(_of_start, attempt))
            line = last_line(path, TRAIN, before=begins)
            if line is None or line["attempt"] < since:
                break
            for key in _LINK_COUNTS:
                kept[key] += int(line.get(key) or 0)
            attempt = min(line["attempt"], attempt - 1)
        return kept

    def _evaluated(self, line: dict[str, Any]) -> None:
        # After a resume the chain repeats some batches: the last result counts.
        step = int(line.get("step", 0))
        for later in [key for key in self._evaluations if key > step]:
            del self._evaluations[later]
        hidden = ("kind", "module", "id")
        shown = {k: v for k, v in line.items() if k not in hidden}
        if line["kind"] == "test":
            self._test = shown
        else:
            self._test = None  # it comes after all evaluations
            self._evaluations[step] = shown
            if len(self._evaluations) > self._most:
                del self._evaluations[min(self._evaluations)]

    def _module(self, name: str, state: RunState) -> ModuleFigures:
        known = state.modules.get(name)
        report = Report.read(self._record.run.worker(name))
        if known is not None:
            report = report.of(known.attempt)
        train, kept = self._train.get(name, {}), self._kept.get(name, {})
        early = report.evaluation if name != self._record.modules[-1] else None
        return ModuleFigures(
            module=name,
            state=known.state if known else report.state if report else "new",
            attempt=known.attempt if known else report.attempt,
            restarts=known.restarts if known else 0,
            pid=report.pid or (known.pid if known else None),
            host=report.host,
            epoch=report.epoch if report else train.get("epoch"),
            step=report.step if report else train.get("step"),
            samples=report.samples if report else train.get("samples"),
            batches_per_s=train.get("batches_per_s"),
            samples_per_s=train.get("samples_per_s"),
            loss=train.get("loss"),
            head_loss=early.get("loss") if early else None,
            head_accuracy=early.get("accuracy") if early else None,
            head_train_accuracy=train.get("head_accuracy"),
            synthesizer_error=train.get("synthesizer_error"),
            synthesizer_cosine=train.get("synthesizer_cosine"),
            lag=train.get("lag"),
            lag_max=train.get("lag_max"),
            gradients_lost=train.get("gradients_lost"),
            window=train.get("window"),
            window_fill=train.get("window_fill"),
            in_flight=train.get("in_flight") if known and known.state == "running" else None,
            waiting=train.get("waiting") or {},
            cpu=train.get("cpu"),
            memory_bytes=train.get("memory_bytes"),
            memory_peak_bytes=train.get("memory_peak_bytes"),
            refused=train.get("refused") or {},
            **{key: value + int(train.get(key) or 0) for key, value in kept.items()},
            exit_code=known.exit_code if known else None,
            signal=known.signal if known else None,
            error=report.error,
            warning=report.warning,
            diverged=report.diverged,
            log=known.log if known else None,
        )

    def _pace(self, what: str) -> float | None:
        """Return the growth of a counter of the tail per second, over this attempt."""
        last = self._train.get(self._record.modules[-1])
        if self._first is None or last is None:
            return None
        if last["time"] <= self._first["time"]:  # the only measurement so far
            return float(last["samples_per_s" if what == "samples" else "batches_per_s"])
        value = (last[what] - self._first[what]) / (last["time"] - self._first["time"])
        return round(float(value), 3)

    def _eta(self, state: RunState, step: int | None) -> float | None:
        total, pace = self._record.total_steps, self._pace("step")
        if not state.active or total is None or step is None or not pace or pace <= 0:
            return None
        last = self._train[self._record.modules[-1]]
        since_s = time.time() - float(last["time"])
        return max((total - step) / pace - since_s, 0.0)


def _of_start(attempt: int, line: dict[str, Any]) -> bool:
    """Return whether a line is of this attempt of its module or a later one."""
    return int(line.get("attempt", 0)) >= attempt
