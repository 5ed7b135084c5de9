"""Evaluations that several replicas of the tail have counted."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from dni_runtime.core.evaluation import Evaluation
from dni_runtime.core.resolve import worker_specs
from dni_runtime.core.step import ModuleStep
from dni_runtime.data import describe
from dni_runtime.documents.metrics import EvaluationLine, read_metrics
from dni_runtime.link import Marker
from dni_runtime.rundir import RunDir
from dni_runtime.spec import WorkerSpec, parse_chain
from dni_runtime.spec.members import Members, first_replicas
from dni_runtime.spec.replicas import workers_of
from dni_runtime.wire import Body, Mark
from dni_runtime.worker import shares
from dni_runtime.worker.evaluations import Evaluations
from dni_runtime.worker.ledger import Counts, Ledger, Progress
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


def marker(id: int, mark: Mark = Mark.EVAL, body: dict[str, Body] | None = None) -> Marker:
    return Marker(id, 1, mark, body or {})


class Replica:
    """One replica of the tail, without links."""

    def __init__(
        self, run: RunDir, spec: WorkerSpec, begun: int = 3, lost: Collection[str] = ()
    ) -> None:
        self.step = ModuleStep(spec)
        metrics = MetricsWriter(run, spec, 1)
        counts = Counts.read(run.ledger(spec.module)) or Counts(step=spec.replica)
        self.ledger = Ledger(run.ledger(spec.module), Progress(counts))
        metrics.progress = self.ledger.progress
        self.members = Members(first_replicas(spec.elastic))
        start = Start(begun=begun, members=self.members)
        self.evaluations = Evaluations(self.step, metrics, self.ledger, start, lost.__contains__)
        self.metrics = metrics


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(shares, "GATHER_MS", 0)
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
        whole = Evaluation.of(first.step)
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


def test_one_that_leaves_within_an_evaluation_hands_over_what_it_has_counted(run: RunDir) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 10), torch.randint(0, 10, (8,))
    specs = tails(replicas="{start: 3, most: 3}")
    first, second, third = (Replica(run, spec, lost=["b.3"]) for spec in specs)
    with contextlib.closing(first.ledger), contextlib.closing(second.ledger):
        for one in (first, second, third):
            one.evaluations.add(*batch)
            one.members.learn(4, {"b": (1, 2, 3)}, {"b": (1,)})
        leaves = marker(4, Mark.SCALE)
        assert not first.evaluations.complete(leaves), "b.2 has not said it; b.3 is lost"
        second.ledger.leaves(4)
        assert second.evaluations.complete(leaves)
        assert first.evaluations.complete(leaves)
        first.ledger.processed(4)
        first.ledger.close()
        first = Replica(run, specs[0], lost=["b.3"])  # another process goes on with it
        first.members.learn(4, {"b": (1, 2, 3)}, {"b": (1,)})
        first.evaluations.add(*batch)
        assert first.evaluations.complete(marker(6))
        first.evaluations.end(1, test=False)
        first.metrics.flush(wait=True)
        (line,) = read_metrics(run.metrics("b.1"), EvaluationLine)
        assert (line.samples, line.step) == (24, 1 + 2), "the first's two batches, the second's one"
