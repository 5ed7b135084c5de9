"""What a run's workers have measured, gathered from its directory: the figures of ``status``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dni_runtime.launch.records import Record
from dni_runtime.launch.slurm.job import JobRecord, read_state
from dni_runtime.launch.state import RunState, WorkerPhase
from dni_runtime.rundir import NewLines, read_json

_TAIL_BYTES = 1 << 18
_LINK_COUNTS = ("missed", "replayed", "resent", "duplicates", "gaps")


@dataclass(frozen=True)
class ModuleFigures:
    """Figures of one module; None where not known or not applicable.

    "Lately" is the interval of the newest line of metrics (docs/metrics.md): about a second, or one
    batch where that takes longer.

    Attributes:
        module: Its name.
        state: Its worker's phase.
        attempt: Which start of the module this is.
        restarts: How often it has been started again in this attempt of the run.
        pid: Its worker's process id.
        host: Its worker's host.
        epoch: The newest epoch it has seen.
        step: Training batches so far.
        samples: Training samples so far.
        batches_per_s: Training batches a second, lately.
        samples_per_s: Training samples a second, lately.
        loss: Mean training loss lately: the tail's, or an early head's.
        head_loss: Of the early head, in the newest evaluation.
        head_accuracy: The same.
        head_train_accuracy: Of the early head on training batches, lately.
        synthesizer_error: Error of the synthesizer, relative to the true gradient, lately.
        synthesizer_cosine: Cosine between predicted and true gradient, lately.
        lag: Batches by which true gradients come late, on average, lately.
        lag_max: The same of the latest one.
        gradients_lost: Share of true gradients that came too late or never, lately.
        window: Most batches that may be under way to the next module.
        window_fill: Mean share of the window in use, lately.
        in_flight: Batches that are under way to the next module, while it runs.
        waiting: Share of the time spent waiting, by reason, lately.
        cpu: CPU time over time, lately.
        memory_bytes: Resident memory.
        memory_peak_bytes: The largest it has been.
        refused: Messages refused, by reason.
        missed: Batches that it did not send on, because the module downstream was gone.
        replayed: Batches that it trained on again, because the module upstream was gone.
        resent: Messages sent again to a module that had been restarted.
        duplicates: Messages that had come before.
        gaps: Ids that never came.
        exit_code: How the worker ended.
        signal: Name of the signal it died of.
        error: The worker's last error.
        warning: What went wrong while it went on, such as a checkpoint that cannot be written.
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
    log: str | None = None


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run.

    Attributes:
        run: The run's name.
        path: Its directory.
        chain: The chain's name.
        backend: What its workers are processes of.
        state: Where the run stands.
        attempt: Which start of the run this is.
        created: Unix time.
        started: Unix time of this attempt's start, or None.
        ended: Unix time of the end, or None.
        exit_code: How the run ended.
        error: What went wrong, or None.
        epoch: Epochs evaluated, or the tail's epoch where none was.
        epochs: Epochs asked for.
        step: Training batches that the tail has done.
        total_steps: Training batches of the whole run, if known.
        accuracy: Of the last evaluation.
        loss: Of the last evaluation.
        evaluations: All evaluations: epoch, step, loss, metrics.
        samples_per_s: Training samples a second at the tail, from the attempt's first to its last
            measurement.
        eta_s: Seconds left, by the pace of this attempt.
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


class LineReader:
    """Reads the JSON lines that are added to a file, each once; damaged lines are passed over.

    Args:
        path: The file, which may not be there yet.
        last_bytes: Begin so many bytes before the end of what is there.
    """

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        self._lines = NewLines(path, last_bytes=last_bytes)

    def new(self) -> Iterator[dict[str, Any]]:
        """What has been added since the last call."""
        for line in self._lines.read():
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict):
                yield document


class Gauge:
    """Follows the figures of one run; :meth:`read` is cheap enough to be called every second."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._metrics: dict[str, LineReader] = {}
        self._train: dict[str, dict[str, Any]] = {}
        self._kept: dict[str, dict[str, int]] = {}
        self._sums: dict[str, dict[str, int]] = {}
        self._first: dict[str, Any] | None = None
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._test: dict[str, Any] | None = None

    def read(self, state: RunState | None = None) -> RunFigures:
        """The figures now.

        Args:
            state: The run's state, where the caller has it.
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
        """Read a module's new lines; those of earlier attempts of the run are left out."""
        since = state.attempt
        if name not in self._metrics:
            known = state.modules.get(name)
            # of a module that was restarted the counters of all its starts are added up
            whole = is_tail or (known is not None and known.restarts > 0)
            path = self._record.run.metrics(name)
            self._metrics[name] = LineReader(path, last_bytes=None if whole else _TAIL_BYTES)
        for line in self._metrics[name].new():
            if line.get("kind") in ("eval", "test"):
                if is_tail:  # others report their early heads
                    self._evaluated(line)
            elif line.get("kind") == "train" and line.get("attempt", 0) >= since:
                self._count(name, line)
                self._train[name] = line
                if is_tail and (self._first is None or self._first["attempt"] < since):
                    self._first = line

    def _count(self, name: str, line: dict[str, Any]) -> None:
        """Counters begin anew with each start of a module; these are of the run's attempt."""
        last = self._train.get(name)
        kept, sums = self._kept.setdefault(name, {}), self._sums.setdefault(name, {})
        for key in _LINK_COUNTS:
            if last is not None and last["attempt"] != line["attempt"]:
                kept[key] = kept.get(key, 0) + int(last.get(key) or 0)
            sums[key] = kept.get(key, 0) + int(line.get(key) or 0)

    def _evaluated(self, line: dict[str, Any]) -> None:
        # After a resume the chain goes over some ground again: what it says last counts.
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

    def _module(self, name: str, state: RunState) -> ModuleFigures:
        known = state.modules.get(name)
        report = read_json(self._record.run.worker(name)) or {}
        if known is not None and report.get("attempt") != known.attempt:
            report = {}
        train, counts = self._train.get(name, {}), self._sums.get(name, {})
        early = report.get("evaluation") if name != self._record.modules[-1] else None
        return ModuleFigures(
            module=name,
            state=known.state if known else report.get("state", "new"),
            attempt=known.attempt if known else report.get("attempt", 0),
            restarts=known.restarts if known else 0,
            pid=report.get("pid") or (known.pid if known else None),
            host=report.get("host"),
            epoch=report.get("epoch", train.get("epoch")),
            step=report.get("step", train.get("step")),
            samples=report.get("samples", train.get("samples")),
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
            **{name: counts.get(name) for name in _LINK_COUNTS},
            exit_code=known.exit_code if known else None,
            signal=known.signal if known else None,
            error=report.get("error"),
            warning=report.get("warning"),
            log=known.log if known else None,
        )

    def _pace(self, what: str) -> float | None:
        """Growth of a counter of the tail per second, over this attempt."""
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
