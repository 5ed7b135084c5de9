"""The server's loop: what it evaluates, and what it does when nothing comes any more."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.resolve import worker_specs
from dni_runtime.core.step import ModuleStep
from dni_runtime.data import describe, open_data
from dni_runtime.errors import DataError
from dni_runtime.files import read_json
from dni_runtime.link import Batch, InputLink, Marker, OutputLink
from dni_runtime.rundir import RunDir
from dni_runtime.spec import TailRole, parse_chain
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker import metrics as worker_metrics
from dni_runtime.worker.checkpoint import CheckpointWriter
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join
from dni_runtime.worker.ledger import Ledger, Progress
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start, begin
from dni_runtime.worker.server import ModuleServer, Outcome
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.stream import Item, Stream, items
from tests.conftest import MakeSpec
from tests.lines import read_lines


def test_one_that_waits_for_its_checkpoint_shows_that_it_lives(
    tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream is gone; who looks from another host knows only the times in the state file."""
    monkeypatch.setattr(worker_metrics, "REPORT_S", 0.02)
    run, stop = RunDir(tmp_path), StopRequest()
    run.create()
    spec = make_spec("tail", tail=TailRole(metrics=()), stop_grace_s=0.5)
    ledger = Ledger(run.ledger("tail"), Progress())
    metrics = MetricsWriter(run, spec, 1, progress=ledger.progress)
    metrics.set_state("running")
    writer = CheckpointWriter(run, "tail", ["tail"], 1, lambda error: None)
    times: set[float] = set()
    doing: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            seen = read_json(run.worker("tail")) or {}
            times.add(seen["time"])
            doing.add(seen["doing"])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with InputLink(spec, run="run") as input:
            server = ModuleServer(
                ModuleStep(spec),
                metrics=metrics,
                checkpoints=writer,
                stop=stop,
                start=Start(),
                ledger=ledger,
                input=Join([[input]]),
            )
            stop._handle(signal.SIGTERM, None)
            with metrics.report.regularly():
                assert server.serve() is Outcome.STOPPED
    finally:
        done.set()
        looking.join()
        writer.close()
        ledger.close()
        stop.close()
    assert len(times) >= 4
    assert "input" in doing


CHAIN = """\
name: whole
epochs: 2
data:
  {dataset: digits, flatten: true, batch_size: 64, eval_batch_size: 50, train_limit: 200, validation: 90}
modules:
  - name: whole
    layers: [{Linear: {in_features: 64, out_features: 10}}]
"""  # noqa: E501


class Whole:
    """A chain of one module, served in this process."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        run.create()
        chain = parse_chain(CHAIN)
        (self.spec,) = worker_specs(chain, describe(chain.data, Path()))
        self.source = open_data(chain.data, Path(), seed=chain.seed)
        self.step: ModuleStep

    def serve(self, resume: str, look: Callable[[Item, StopRequest], None]) -> Outcome:
        """Serve from where the run stands; ``look`` sees each item before the server does."""
        assert self.spec.head is not None
        self.step, stop = ModuleStep(self.spec), StopRequest()
        start, ledger = begin(resume, self.spec, self.run, self.step, ["whole"])
        metrics = MetricsWriter(self.run, self.spec, 1, progress=ledger.progress)
        writer = CheckpointWriter(self.run, "whole", ["whole"], 2, pytest.fail)

        def seen() -> Iterator[Item]:
            for item in items(self.source, self.spec.head, start.position):  # type: ignore[arg-type]
                look(item, stop)
                yield item

        try:
            return ModuleServer(
                self.step, metrics=metrics, checkpoints=writer, stop=stop, start=start,
                ledger=ledger, stream=seen(),
            ).serve()  # fmt: skip
        finally:
            writer.close()
            ledger.close()
            stop.close()

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run.metrics("whole")) if line["kind"] == kind]


@pytest.mark.parametrize("interruption", ["none", "stop", "death"])
@pytest.mark.parametrize(("phase", "batch"), [("eval", 2), ("test", 1), ("test", 4), ("test", 8)])
def test_the_test_set_is_evaluated_once_and_whole(
    tmp_path: Path, interruption: str, phase: str, batch: int
) -> None:
    whole = Whole(RunDir(tmp_path))

    def interrupt(item: Item, stop: StopRequest) -> None:
        at = item.position
        if item.mode is not Mode.EVAL or (at.epoch, at.phase, at.eval_batch) != (2, phase, batch):
            return
        if interruption == "stop":
            stop._handle(signal.SIGTERM, None)
        elif interruption == "death":
            raise DataError("no more")

    if interruption == "stop":
        assert whole.serve("auto", interrupt) is Outcome.STOPPED
    elif interruption == "death":
        with pytest.raises(DataError):
            whole.serve("auto", interrupt)
    assert whole.lines("test") == []
    resume = "own" if interruption == "death" else "auto"
    assert whole.serve(resume, lambda item, stop: None) is Outcome.FINISHED
    (line,) = whole.lines("test")
    assert (line["samples"], line["epoch"]) == (360, 2)
    assert [line["samples"] for line in whole.lines("eval")] == [90, 90]
    expected = evaluate(whole.step.evaluate, whole.source.test_batches(), whole.spec)
    assert line["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    assert line["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_the_module_hears_of_the_end_of_each_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test set's begins right after one of held-out samples; so recurrent layers begin anew."""
    heard: list[int] = []
    whole = Whole(RunDir(tmp_path))
    monkeypatch.setattr(ModuleStep, "end_evaluation", lambda step: heard.append(step.batches))
    assert whole.serve("auto", lambda item, stop: None) is Outcome.FINISHED
    assert heard == [4, 8, 8]


LATE = """\
name: two
data: {dataset: digits, flatten: true, batch_size: 16, train_limit: 320}
eval_every: 0
defaults: {interface: {delayed: {max_late: 1}}}
modules:
  - {name: a, layers: [{Linear: {in_features: 64, out_features: 8}}]}
  - {name: b, layers: [{Linear: {in_features: 8, out_features: 10}}]}
"""


def test_gradients_that_two_restarted_modules_have_lost_are_not_waited_for(tmp_path: Path) -> None:
    """The head sends again what the tail was trained on before both were restarted."""
    run, stop, had = RunDir(tmp_path), StopRequest(), 10
    run.create()
    chain = parse_chain(LATE)
    spec, below = worker_specs(chain, describe(chain.data, Path()))
    assert spec.head is not None
    step, source = ModuleStep(spec), open_data(chain.data, Path(), seed=1)
    ledger = Ledger(run.ledger("a"), Progress())
    writer = CheckpointWriter(run, "a", ["a"], 1, lambda error: None)
    outcomes: list[Outcome] = []
    with (
        closing(stop), closing(writer), closing(ledger),
        InputLink(below, run="run", received=had, again=True) as input,
        OutputLink(spec, run="run") as output,
    ):  # fmt: skip
        address = input.bind(f"ipc://{tmp_path}/b.sock")

        def serve() -> None:
            output.connect(address, deadline_s=10)
            metrics = MetricsWriter(run, spec, 1, progress=ledger.progress)
            server = ModuleServer(
                step, metrics=metrics, checkpoints=writer, stop=stop,
                start=Start(), ledger=ledger, stream=Stream(source, spec.head),  # type: ignore[arg-type]
                output=Fanout([[output]]),
            )  # fmt: skip
            outcomes.append(server.serve())

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            input.wait_for_peer(10)
            input.send_drained(had)
            until_s = time.monotonic() + 30
            over = False
            while not over and time.monotonic() < until_s:
                item = input.receive()
                if isinstance(item, Batch) and item.id > had:
                    input.send_gradient(item.id, item.xs[0], ack=item.id)
                elif item is not None:
                    over = isinstance(item, Marker) and Mark.END in item.mark
                    if isinstance(item, Marker):
                        input.send_drained(item.id)
                    input.ack(item.id)
                time.sleep(0.001)
            assert over, "it waits for gradients that will not come"
            assert input.finish(10)
        finally:
            stop._handle(signal.SIGTERM, None)
            serving.join(30)
    assert outcomes == [Outcome.FINISHED]
    assert step.counters.given_up == had


FULL = """\
name: full
data: {dataset: digits, flatten: true, batch_size: 16}
stop_grace_s: 0.5
modules:
  - {name: a, layers: [{Linear: {in_features: 64, out_features: 8}}], interface: mixed}
  - {name: b, layers: [{Linear: {in_features: 8, out_features: 8}}], interface: mixed}
  - {name: c, layers: [{Linear: {in_features: 8, out_features: 10}}]}
"""


def test_a_restarted_head_is_answered_while_there_is_no_room_downstream(tmp_path: Path) -> None:
    """In a graph, downstream may wait for that head before it makes room."""
    run, stop = RunDir(tmp_path), StopRequest()
    run.create()
    chain = parse_chain(FULL)
    a, b, c = worker_specs(chain, describe(chain.data, Path()))
    ledger = Ledger(run.ledger("b"), Progress())
    writer = CheckpointWriter(run, "b", ["b"], 1, lambda error: None)
    with (
        closing(stop), closing(writer), closing(ledger),
        InputLink(b, run="run") as input, OutputLink(b, run="run") as output,
        InputLink(c, run="run") as full,
    ):  # fmt: skip
        address = input.bind(f"ipc://{tmp_path}/b.sock")
        below = full.bind(f"ipc://{tmp_path}/c.sock")
        metrics = MetricsWriter(run, b, 1, progress=ledger.progress)

        def serve() -> None:
            output.connect(below, deadline_s=10)
            ModuleServer(
                ModuleStep(b), metrics=metrics, checkpoints=writer, stop=stop,
                start=Start(), ledger=ledger, input=Join([[input]]), output=Fanout([[output]]),
            ).serve()  # fmt: skip

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            full.wait_for_peer(10)
            with OutputLink(a, run="run") as head:
                head.connect(address, deadline_s=10)
                until_s = time.monotonic() + 20
                id = 0
                while metrics.doing != "window" or head.room:
                    assert time.monotonic() < until_s
                    if head.room:
                        id += 1
                        h, y = torch.randn(16, 8), torch.randint(0, 10, (16,))
                        head.send_batch(id, 1, Mode.TRAIN, h, y)
                    list(head.receive())
                    time.sleep(0.01)
            with OutputLink(a, run="run", next_id=id + 1) as restarted:
                restarted.connect(address, deadline_s=10)
                assert restarted.connected
        finally:
            stop._handle(signal.SIGTERM, None)
            serving.join(30)
