"""Measurements of a run's workers, read from its directory: the figures of ``status``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from dni_runtime.documents.base import Document
from dni_runtime.documents.metrics import (
    EVAL,
    EvaluationLine,
    Measured,
    MetricsLine,
    TrainLine,
    parse_evaluation,
    parse_line,
    parse_train,
)
from dni_runtime.documents.records import JobRecord
from dni_runtime.documents.reports import Diverged, Report, WorkerPhase
from dni_runtime.documents.state import RunState
from dni_runtime.launch.records import Record
from dni_runtime.launch.schedulers import read_state
from dni_runtime.lines import LineReader, last_line, offset_of_last, offset_where
from dni_runtime.rundir import RunDir
from dni_runtime.spec.replicas import tails_of

EVALUATIONS = 1000
"""Most evaluations shown; earlier ones are in the tail's metrics file."""

_NEWEST_BYTES, _SEARCHED_BYTES = 1 << 18, 1 << 26  # of months, as workers write them
_LINK_COUNTS = ("missed", "replayed", "resent", "duplicates", "gaps")


class ModuleFigures(Measured):
    """Figures of one module; None if unknown or not applicable."""

    module: str
    state: WorkerPhase
    attempt: int  # number of this start of the module
    restarts: int = 0  # in this attempt of the run
    pid: int | None = None
    host: str | None = None
    epoch: int | None = None  # the newest that it has seen
    step: int | None = None  # training batches so far
    samples: int | None = None  # of training, so far
    head_loss: float | None = None  # of the early head, in the newest evaluation
    head_accuracy: float | None = None  # of the early head, in the newest evaluation
    head_train_accuracy: float | None = None  # of the early head, on training batches, lately
    exit_code: int | None = None
    signal: str | None = None  # name of the one that killed it
    error: str | None = None  # the worker's last one
    # a problem that did not stop it, such as a checkpoint that cannot be written
    warning: str | None = None
    diverged: Diverged | None = None  # a value that is NaN or infinite
    log: str | None = None  # a file


class RunFigures(Document):
    """Figures of a run."""

    run: str
    path: str  # its directory
    chain: str
    backend: str
    state: str
    attempt: int  # number of this start of the run
    created: float  # Unix time, as the next two
    started: float | None  # of this attempt
    ended: float | None
    exit_code: int | None
    error: str | None
    epoch: int | None  # epochs evaluated, or the tail's epoch before the first evaluation
    epochs: int  # requested
    step: int | None  # training batches completed by the tail
    total_steps: int | None  # training batches of the whole run, if known
    accuracy: float | None  # of the last evaluation
    loss: float | None  # of the last evaluation
    evaluations: tuple[EvaluationLine, ...]  # the last ones, up to ``EVALUATIONS``
    # of training, at the tail with all its replicas, from the attempt's first to its last
    # measurement
    samples_per_s: float | None
    eta_s: float | None  # seconds left, at the pace of this attempt
    modules: tuple[ModuleFigures, ...]  # head first
    job: str | None = None  # of Slurm
    test: EvaluationLine | None = None  # evaluation of the test set


def newest_train(run: RunDir, module: str) -> TrainLine | None:
    """Return the newest line about a module's training; None if none is near its file's end."""
    paths = (run.metrics(module), run.recent_metrics(module))
    found = [last_line(path, parse_train, within=_NEWEST_BYTES) for path in paths]
    return max((line for line in found if line), key=lambda line: line.time, default=None)


class MetricsReader:
    """Reads the figures of one run; :meth:`read` is cheap enough to be called every second.

    Metrics files are read from their end: a run of months costs no more than one of minutes.
    """

    def __init__(self, record: Record, *, evaluations: int = EVALUATIONS) -> None:
        self._record = record
        self._most = evaluations
        self._lines: LineReader[EvaluationLine] | None = None
        self._train: dict[str, TrainLine] = {}
        self._kept: dict[str, dict[str, int]] = {}
        self._tails = tails_of(record.modules)
        self._first: dict[str, TrainLine] = {}
        self._evaluations: dict[int, EvaluationLine] = {}
        self._test: EvaluationLine | None = None

    def read(self, state: RunState | None = None) -> RunFigures:
        """Return the current figures; ``state`` is the run's, if the caller has it."""
        record = self._record
        state = state or read_state(record.run)
        job = JobRecord.load(record.run.job)
        for line in self._news(self._tails[0]):
            self._evaluated(line)
        for name in record.modules:
            self._follow(name, state)
        modules = tuple(self._module(name, state) for name in record.modules)
        evaluations = tuple(self._evaluations[key] for key in sorted(self._evaluations))
        last = evaluations[-1] if evaluations else None
        steps = [one.step for one in modules if one.module in self._tails and one.step is not None]
        step = sum(steps) if steps else None
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
            epoch=last.epoch if last else modules[-1].epoch,
            epochs=record.epochs,
            step=step,
            total_steps=record.total_steps,
            accuracy=last.accuracy if last else None,
            loss=last.loss if last else None,
            evaluations=evaluations,
            test=self._test,
            samples_per_s=self._pace("samples"),
            eta_s=self._eta(state, step),
            modules=modules,
        )

    def _follow(self, name: str, state: RunState) -> None:
        """Read a module's newest line; ignore earlier attempts of the run."""
        since = state.attempt
        newest = newest_train(self._record.run, name)
        if newest is None or newest.attempt < since:
            return
        last = self._train.get(name)
        if last is None or last.attempt != newest.attempt:
            self._kept[name] = self._former_counts(name, since, newest.attempt)
        self._train[name] = newest
        first = self._first.get(name)
        if name in self._tails and (first is None or first.attempt < since):
            self._first[name] = self._first_train(name, since) or newest

    def _news(self, tail: str) -> Iterator[EvaluationLine]:
        """Return the tail's new evaluations; at first the last ones."""
        if self._lines is None:
            path = self._record.run.metrics(tail)
            offset = offset_of_last(path, self._most, EVAL, within=_SEARCHED_BYTES)
            self._lines = LineReader(path, parse_evaluation, offset=offset)
        return self._lines.new()

    def _first_train(self, name: str, since: int) -> TrainLine | None:
        path = self._record.run.metrics(name)
        offset = offset_where(path, parse_line, partial(_of_start, since))
        return next(LineReader(path, parse_train, offset=offset).new(), None)

    def _former_counts(self, name: str, since: int, attempt: int) -> dict[str, int]:
        """Return the sums of counters over earlier attempts: each attempt resets them."""
        kept = dict.fromkeys(_LINK_COUNTS, 0)
        path = self._record.run.metrics(name)
        while attempt > since:
            begins = offset_where(path, parse_line, partial(_of_start, attempt))
            line = last_line(path, parse_train, before=begins)
            if line is None or line.attempt < since:
                break
            for key in _LINK_COUNTS:
                kept[key] += getattr(line, key) or 0
            attempt = min(line.attempt, attempt - 1)
        return kept

    def _evaluated(self, line: EvaluationLine) -> None:
        # After a resume the chain repeats some batches: the last result counts.
        for later in [key for key in self._evaluations if key > line.step]:
            del self._evaluations[later]
        if line.kind == "test":
            self._test = line
        else:
            self._test = None  # it comes after all evaluations
            self._evaluations[line.step] = line
            if len(self._evaluations) > self._most:
                del self._evaluations[min(self._evaluations)]

    def _module(self, name: str, state: RunState) -> ModuleFigures:
        known = state.modules.get(name)
        report = Report.read(self._record.run.worker(name))
        if known is not None:
            report = report.of(known.attempt)
        train = self._train.get(name)
        if known is not None and known.state == "inactive":  # the first replica has its counts
            return ModuleFigures(module=name, state=known.state, attempt=known.attempt)
        done = report or train
        early = report.evaluation if name not in self._tails else None
        return ModuleFigures(
            **self._measured(name, running=known is not None and known.state == "running"),
            module=name,
            state=known.state if known else report.state if report else "new",
            attempt=known.attempt if known else report.attempt,
            restarts=known.restarts if known else 0,
            pid=report.pid or (known.pid if known else None),
            host=report.host,
            epoch=report.epoch if report else train.epoch if train else None,
            step=done.step if done else None,
            samples=done.samples if done else None,
            head_loss=early.loss if early else None,
            head_accuracy=early.accuracy if early else None,
            head_train_accuracy=train.head_accuracy if train else None,
            exit_code=known.exit_code if known else None,
            signal=known.signal if known else None,
            error=report.error,
            warning=report.warning,
            diverged=report.diverged,
            log=known.log if known else None,
        )

    def _measured(self, name: str, *, running: bool) -> dict[str, Any]:
        """Return a module's newest measurements, with counts of all its attempts."""
        train = self._train.get(name)
        if train is None:
            return {}
        found = {key: getattr(train, key) for key in Measured.model_fields}
        counts = {key: (found[key] or 0) + kept for key, kept in self._kept[name].items()}
        return found | counts | {"in_flight": train.in_flight if running else None}

    def _pace(self, what: Literal["step", "samples"]) -> float | None:
        """Return the growth of a counter of the tail per second, over this attempt."""
        paces = [self._pace_of(what, self._train[name], one) for name, one in self._first.items()]
        known = [one for one in paces if one is not None]
        return round(sum(known), 3) if known else None

    def _pace_of(
        self, what: Literal["step", "samples"], last: TrainLine, first: TrainLine
    ) -> float | None:
        if last.time <= first.time:  # the only measurement so far
            return last.samples_per_s if what == "samples" else last.batches_per_s
        grown: int = getattr(last, what) - getattr(first, what)
        return grown / (last.time - first.time)

    def _eta(self, state: RunState, step: int | None) -> float | None:
        total, pace = self._record.total_steps, self._pace("step")
        if not state.active or total is None or step is None or not pace or pace <= 0:
            return None
        since_s = time.time() - max(self._train[name].time for name in self._first)
        return max((total - step) / pace - since_s, 0.0)


def _of_start(attempt: int, line: MetricsLine) -> bool:
    """Return whether a line is of this attempt of its module or a later one."""
    return line.attempt >= attempt
