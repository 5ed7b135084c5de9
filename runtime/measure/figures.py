"""Figures of a run: what ``status`` and Prometheus show, read from what its workers write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from dni_runtime.files import written_lately
from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.figures import counter, families, family, gauge, page
from dni_runtime.run.documents.metrics import (
    EVAL,
    Evaluation,
    EvaluationLine,
    TrainingFigures,
    parse_evaluation,
)
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.reports import ENDED, DivergedValue, Report, WorkerPhase
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.lines import LineReader, offset_of_last
from dni_runtime.run.record import Record
from dni_runtime.schedulers.schedulers import read_state
from dni_runtime.spec.replicas import tails_of

EVALUATIONS = 1000
"""Most evaluations shown; earlier ones are in the tail's metrics file."""


STALE_S = 15.0
"""Age from which a report is old: workers write one about once a second."""

_SILENT = ENDED | {"new", "starting", "restarting"}


class ModuleFigures(TrainingFigures):
    """Figures of one module; None if unknown or not applicable."""

    module: str
    state: WorkerPhase
    attempt: int  # number of this start of the module
    restarts: int = counter("restarts in this attempt of the run", column="restarts", default=0)
    pid: int | None = None
    host: str | None = None
    epoch: int | None = gauge("the newest epoch that it has seen")
    step: int | None = counter("training batches so far", "batches")
    samples: int | None = counter("training samples so far")
    evaluation: Evaluation | None = None  # the newest: of its early head, or the chain's
    exit_code: int | None = None
    signal: str | None = None  # name of the one that killed it
    error: str | None = None  # the worker's last one
    # a problem that did not stop it, such as a checkpoint that cannot be written
    warning: str | None = None
    diverged: DivergedValue | None = None  # a value that is NaN or infinite
    log: str | None = None  # a file
    # of these figures, if its worker should have written newer ones: it cannot, or does not respond
    age_s: float | None = None


class RunFigures(Document):
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
    # of training, at the tail with all its replicas, since their last starts
    samples_per_s: float | None
    eta_s: float | None  # seconds left, at the pace of this attempt
    modules: tuple[ModuleFigures, ...]  # head first
    job: str | None = None  # of Slurm
    test: EvaluationLine | None = None  # evaluation of the test set


class MetricsReader:
    """Reads the figures of one run; :meth:`read` is cheap enough to be called every second.

    They are in the workers' reports, except evaluations, which the first tail's lines have.
    """

    def __init__(self, record: Record, *, evaluations: int = EVALUATIONS) -> None:
        self._record = record
        self._most = evaluations
        self._tails = tails_of(record.modules)
        self._lines: LineReader[EvaluationLine] | None = None
        self._evaluations: dict[int, EvaluationLine] = {}
        self._test: EvaluationLine | None = None

    def read(self, state: RunState | None = None) -> RunFigures:
        """Return the current figures; ``state`` is the run's, if the caller has it."""
        record = self._record
        state = state or read_state(record.run)
        job = JobRecord.load(record.run.job)
        self._read_evaluations()
        reports = {name: self._report(name, state) for name in record.modules}
        modules = tuple(
            _module(name, report, state).model_copy(
                update={"age_s": self._age_s(name, report, state)}
            )
            for name, report in reports.items()
        )
        tails = [reports[name] for name in self._tails if reports[name].step is not None]
        evaluations = tuple(self._evaluations[key] for key in sorted(self._evaluations))
        last = evaluations[-1] if evaluations else None
        step = sum(tail.step or 0 for tail in tails) if tails else None
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
            samples_per_s=_rate(tails, "samples_per_s"),
            eta_s=self._eta(state, step, tails),
            modules=modules,
        )

    def _report(self, name: str, state: RunState) -> Report:
        """Return a worker's newest report; an empty one if it is of an earlier start of the run."""
        report, known = Report.read(self._record.run.worker(name)), state.modules.get(name)
        # The first replica has the counts of those without a worker.
        inactive = known is not None and known.state == "inactive"
        return Report() if inactive or report.attempt < state.attempt else report

    def _age_s(self, name: str, report: Report, state: RunState) -> float | None:
        """Return the age of a worker's report if it is older than it should be."""
        known = state.modules.get(name)
        if not (state.active and report and known) or known.state in _SILENT:
            return None
        if written_lately(self._record.run.worker(name), report.time, STALE_S):
            return None
        return max(time.time() - report.time, 0.0)

    def _read_evaluations(self) -> None:
        """Read the tail's new evaluations; at first the last ones."""
        if self._lines is None:
            path = self._record.run.metrics(self._tails[0])
            offset = offset_of_last(path, self._most, EVAL)
            self._lines = LineReader(path, parse_evaluation, offset=offset)
        for line in self._lines.new():
            # After a resume the chain repeats some batches: the last result counts.
            for later in [key for key in self._evaluations if key > line.step]:
                del self._evaluations[later]
            if line.kind == "test":
                self._test = line
                continue
            self._test = None  # it comes after all evaluations
            self._evaluations[line.step] = line
            if len(self._evaluations) > self._most:
                del self._evaluations[min(self._evaluations)]

    def _eta(self, state: RunState, step: int | None, tails: Sequence[Report]) -> float | None:
        total, rate = self._record.total_steps, _rate(tails, "batches_per_s")
        if not state.active or total is None or step is None or not rate:
            return None
        since_s = time.time() - max(tail.train.time for tail in tails if tail.train is not None)
        return max((total - step) / rate - since_s, 0.0)


def _module(name: str, newest: Report, state: RunState) -> ModuleFigures:
    known = state.modules.get(name)
    measured: dict[str, Any] = {}
    if newest.train is not None:
        measured = {key: getattr(newest.train, key) for key in TrainingFigures.model_fields}
        if known is None or known.state != "running":
            measured["in_flight"] = None
    report = newest.of(known.attempt) if known else newest
    return ModuleFigures(
        **measured,
        module=name,
        state=known.state if known else report.state if report else "new",
        attempt=known.attempt if known else report.attempt,
        restarts=known.restarts if known else 0,
        pid=report.pid or (known.pid if known else None),
        host=report.host,
        epoch=newest.epoch,
        step=newest.step,
        samples=newest.samples,
        evaluation=newest.evaluation,
        exit_code=known.exit_code if known else None,
        signal=known.signal if known else None,
        error=report.error,
        warning=report.warning,
        diverged=report.diverged,
        log=known.log if known else None,
    )


def _rate(tails: Sequence[Report], name: Literal["batches_per_s", "samples_per_s"]) -> float | None:
    """Return a rate of training at the tail with all its replicas, over this attempt."""
    rates = [rate for tail in tails if (rate := getattr(tail, name)) is not None]
    return round(sum(rates), 3) if rates else None


def module_families(runs: Sequence[tuple[dict[str, str], RunFigures]]) -> list[list[str]]:
    """Return the families of the modules' newest figures, of runs with these labels."""
    modules = [
        ({**labels, "module": module.module}, module)
        for labels, run in runs
        for module in run.modules
    ]
    running = [(labels, int(module.state == "running")) for labels, module in modules]
    text = "whether the module's worker runs"
    return [family("running", "gauge", text, running), *families(modules)]


def prometheus_page(run: RunFigures) -> str:
    """Return a run's newest figures in Prometheus' text format."""
    running, *figures = module_families([({"run": run.run}, run)])
    evaluation = run.evaluations[-1].figures if run.evaluations else {}
    metrics = [({"run": run.run, "metric": name}, value) for name, value in evaluation.items()]
    evaluated = family("evaluation", "gauge", "newest evaluation of the chain", metrics)
    return page([running, evaluated, *figures])
