"""Evaluations that several replicas of the tail have counted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.step import ModuleStep
from dni_runtime.data import describe
from dni_runtime.link import Marker
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.documents.metrics import EvaluationLine, read_metrics
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec, parse_chain
from dni_runtime.spec.replicas import with_replicas, workers_of
from dni_runtime.wire import Mark
from dni_runtime.worker import evaluations
from dni_runtime.worker.evaluations import Evaluations
from dni_runtime.worker.ledger import Counts, Ledger, ModuleProgress
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start

CHAIN = """\
name: net
metrics: [accuracy, %s]
data: {dataset: digits, flatten: true, batch_size: 128}
modules:
- {name: a, layers: [{Linear: {in_features: 64, out_features: 10}}]}
- {name: b, replicas: %s, layers: [{Linear: {in_features: 10, out_features: 10}}]}
"""
F1 = "{F1Score: {task: multiclass, num_classes: 10, average: macro}}"


def tails(metric: str = F1, replicas: str = "3") -> tuple[WorkerSpec, ...]:
    chain = parse_chain(CHAIN % (metric, replicas))
    return workers_of(worker_specs(chain, describe(chain.data, Path())))[1:]


def marker(id: int) -> Marker:
    return Marker(id, 1, Mark.EVAL)


class Replica:
    """One replica of the tail, without links."""

    def __init__(self, run: RunDir, spec: WorkerSpec, begun: int = 3) -> None:
        self.step = ModuleStep(spec)
        metrics = MetricsWriter(run, spec, 1)
        counts = Counts.read(run.ledger(spec.module)) or Counts(step=spec.replica)
        self.ledger = Ledger(run.ledger(spec.module), ModuleProgress(counts))
        metrics.progress = self.ledger.progress
        self.evaluations = Evaluations(self.step, metrics, self.ledger, Start(begun=begun))
        self.metrics = metrics


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(evaluations, "GATHER_MS", 0)
    made = RunDir(tmp_path)
    made.create()
    return made


def test_the_first_replica_reports_what_all_have_counted(run: RunDir) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 10), torch.randint(0, 10, (8,))) for _ in range(5)]
    with contextlib.ExitStack() as stack:

        def started(spec: WorkerSpec, begun: int = 3) -> Replica:
            made = Replica(run, spec, begun)
            stack.callback(made.ledger.close)
            return made

        first, second, third = map(started, tails())
        whole = EvaluationSums.of(first.step)
        for number, (h, y) in enumerate(batches):
            whole.add(h, y)
            (first, second)[number % 2].evaluations.add(h, y)
        second.ledger.processed(5)
        earlier = started(tails()[2], begun=2)
        assert earlier.evaluations.complete(marker(6)), "of a start that is over"
        assert second.evaluations.complete(marker(6))
        assert not second.evaluations.end(1, test=False)
        assert not first.evaluations.complete(marker(6)), (
            "the third has not said that it has counted none"
        )
        second = started(tails()[1])  # before it had acknowledged the marker
        assert second.evaluations.complete(marker(6))
        assert third.evaluations.complete(marker(6))
        assert first.evaluations.complete(marker(6))
        assert not first.evaluations.end(1, test=False)
        assert not second.evaluations.end(1, test=False)
        for one in (first, second, third):
            one.metrics.flush(wait=True)
        (line,) = read_metrics(run.metrics("b.1"), EvaluationLine)
        assert not list(read_metrics(run.metrics("b.2"), EvaluationLine))
        assert (line.samples, line.step) == (40, 1 + 2 + 3)
        assert line.figures == pytest.approx(whole.result(), abs=1e-6)
        # the next one begins with nothing
        for one in (first, second, third):
            one.evaluations.add(*batches[0])
        assert second.evaluations.complete(marker(9))
        assert not first.evaluations.complete(marker(9))
        assert third.evaluations.complete(marker(9))
        assert first.evaluations.complete(marker(9))
        first.evaluations.end(2, test=False)
        first.metrics.flush(wait=True)
        *_, line = read_metrics(run.metrics("b.1"), EvaluationLine)
        assert (line.samples, line.epoch) == (24, first.ledger.progress.epoch)


def test_a_full_disk_is_waited_for(run: RunDir) -> None:
    _, spec, _ = tails()
    replica = Replica(run, spec)
    with contextlib.closing(replica.ledger):
        run.shares("b.2").mkdir()
        assert not replica.evaluations.complete(marker(4))
        run.shares("b.2").rmdir()
        assert replica.evaluations.complete(marker(4))


def test_nobody_waits_for_a_replica_that_takes_no_part_in_this_start(run: RunDir) -> None:
    first, second, _ = (
        with_replicas(one, one.elastic) for one in tails(replicas="{start: 2, most: 3}")
    )
    batch = torch.randn(8, 10), torch.randint(0, 10, (8,))
    replicas = [Replica(run, spec) for spec in (first, second)]
    with contextlib.ExitStack() as stack:
        for one in replicas:
            stack.callback(one.ledger.close)
            one.evaluations.add(*batch)
        reports, other = replicas
        assert not reports.evaluations.complete(marker(6))
        assert other.evaluations.complete(marker(6))
        assert reports.evaluations.complete(marker(6))
        reports.evaluations.end(1, test=False)
        reports.metrics.flush(wait=True)
        (line,) = read_metrics(run.metrics("b.1"), EvaluationLine)
        assert (line.samples, line.step) == (16, 1 + 2)


def test_the_only_replica_of_this_start_reports_by_itself(run: RunDir) -> None:
    spec, *_ = (with_replicas(one, one.elastic) for one in tails(replicas="{start: 1, most: 3}"))
    assert spec.module == "b.1"
    alone = Replica(run, spec)
    with contextlib.closing(alone.ledger):
        alone.evaluations.add(torch.randn(8, 10), torch.randint(0, 10, (8,)))
        assert alone.evaluations.complete(marker(6))
        alone.evaluations.end(1, test=False)
        alone.metrics.flush(wait=True)
        (line,) = read_metrics(run.metrics("b.1"), EvaluationLine)
        assert (line.samples, line.step) == (8, 1)
