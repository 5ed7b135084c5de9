"""The server's loop: what it evaluates, and what it does when nothing comes any more."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.step import ModuleStep
from dni_runtime.data import describe, open_data
from dni_runtime.errors import DataError
from dni_runtime.files import read_json
from dni_runtime.link import Batch, InputLink, Marker, OutputLink
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.documents.reports import Endpoint, Report, WorkerPhase
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import TailRole, parse_chain
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker import report
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join
from dni_runtime.worker.neighbours import Neighbours
from dni_runtime.worker.resume import begin
from dni_runtime.worker.server import Stage
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.stream import Item, Position, Stream
from tests.conftest import MakeSpec
from tests.integration.served import Listed, worker_of
from tests.lines import read_lines
from tests.specs import linear


def test_one_that_waits_for_its_checkpoint_shows_that_it_lives(
    run: RunDir, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream is gone; who looks from another host knows only the times in the state file."""
    monkeypatch.setattr(report, "REPORT_S", 0.02)
    spec = make_spec("tail", tail=TailRole(metrics=()), stop_grace_s=0.5)
    times: set[float] = set()
    doing: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            seen = read_json(run.worker("tail")) or {}
            times.add(seen["time"])
            doing.add(seen["doing"])

    looking = threading.Thread(target=look)
    with worker_of(run, spec) as worker, closing(InputLink(spec, run="run")) as input:
        worker.metrics.set_state("running")
        looking.start()
        try:
            worker.stop._handle(signal.SIGTERM, None)
            with worker.metrics.report.regularly():
                assert worker.server(input=Join([[input]])).serve() is Stage.STOPPED
        finally:
            done.set()
            looking.join()
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
        chain = parse_chain(CHAIN)
        (self.spec,) = worker_specs(chain, describe(chain.data, Path()))
        self.source = open_data(chain.data, Path(), seed=chain.seed)
        self.step: ModuleStep

    def serve(self, resume: str, look: Callable[[Item, StopRequest], None]) -> Stage:
        """Serve from where the run stands; ``look`` sees each item before the server does."""
        self.step = ModuleStep(self.spec)
        begun = begin(resume, self.spec, self.run, self.step, ["whole"])
        assert self.spec.head is not None
        with worker_of(self.run, self.spec, begun=begun, step=self.step) as worker:

            class Seen(Stream):
                def __next__(self) -> Item:
                    item = super().__next__()
                    look(item, worker.stop)
                    return item

            stream = Seen(self.source, self.spec.head, begun[0].position)
            return worker.server(stream=stream).serve()

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run.metrics("whole")) if line["kind"] == kind]


@pytest.mark.parametrize("interruption", ["none", "stop", "death"])
@pytest.mark.parametrize(("phase", "batch"), [("eval", 2), ("test", 1), ("test", 4), ("test", 8)])
def test_the_test_set_is_evaluated_once_and_whole(
    run: RunDir, interruption: str, phase: str, batch: int
) -> None:
    whole = Whole(run)

    def interrupt(item: Item, stop: StopRequest) -> None:
        at = item.position
        if item.mode is not Mode.EVAL or (at.epoch, at.phase, at.eval_batch) != (2, phase, batch):
            return
        if interruption == "stop":
            stop._handle(signal.SIGTERM, None)
        elif interruption == "death":
            raise DataError("no more")

    if interruption == "stop":
        assert whole.serve("auto", interrupt) is Stage.STOPPED
    elif interruption == "death":
        with pytest.raises(DataError):
            whole.serve("auto", interrupt)
    assert whole.lines("test") == []
    resume = "own" if interruption == "death" else "auto"
    assert whole.serve(resume, lambda item, stop: None) is Stage.FINISHED
    (line,) = whole.lines("test")
    assert (line["samples"], line["epoch"]) == (360, 2)
    assert [line["samples"] for line in whole.lines("eval")] == [90, 90]
    expected = evaluate(whole.step.evaluate, whole.source.test_batches(), whole.spec)
    assert line["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    assert line["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_the_module_hears_of_the_end_of_each_evaluation(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test set's begins right after one of held-out samples; so recurrent layers begin anew."""
    heard: list[int] = []
    whole = Whole(run)
    monkeypatch.setattr(ModuleStep, "end_evaluation", lambda step: heard.append(step.batches))
    assert whole.serve("auto", lambda item, stop: None) is Stage.FINISHED
    assert heard == [4, 8, 8]


LATE = """\
name: two
data: {dataset: digits, flatten: true, batch_size: 16, train_limit: 320}
eval_every: 0
defaults: {interface: {delayed: {max_late: 1}}}
""" + linear(64, 8, 10)


def test_gradients_that_two_restarted_modules_have_lost_are_not_waited_for(run: RunDir) -> None:
    """The head sends again what the tail was trained on before both were restarted."""
    had, chain = 10, parse_chain(LATE)
    spec, below = worker_specs(chain, describe(chain.data, Path()))
    assert spec.head is not None
    stream = Stream(open_data(chain.data, Path(), seed=1), spec.head)
    outcomes: list[Stage] = []
    with (
        worker_of(run, spec) as worker,
        closing(InputLink(below, run="run", received=had, restarted=True)) as input,
        closing(OutputLink(spec, run="run")) as output,
    ):
        address = input.bind(f"ipc://{run.root}/b.sock")

        def serve() -> None:
            output.connect(address, deadline_s=10)
            server = worker.server(stream=stream, output=Fanout([[output]]))
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
            worker.stop._handle(signal.SIGTERM, None)
            serving.join(30)
    assert outcomes == [Stage.FINISHED]
    assert worker.step.counters.given_up == had


def test_one_that_dies_long_after_the_end_was_sent_gets_it_again(run: RunDir) -> None:
    """For a moment it has failed by its own report, and its supervisor does not restart it yet."""
    chain = parse_chain(LATE)
    chain = chain.model_copy(update={"stop_grace_s": 0.1})
    spec, below = worker_specs(chain, describe(chain.data, Path()))
    reports = Neighbours(spec, run, address=None, restarted=False, stop=lambda: False)

    def says(attempt: int, state: WorkerPhase) -> None:
        Report(attempt=attempt, state=state).write(run.worker(below.module))

    def until_end(input: InputLink) -> None:
        input.wait_for_peer(10)
        until_s = time.monotonic() + 10
        while not (isinstance(item := input.receive(), Marker) and Mark.END in item.mark):
            assert time.monotonic() < until_s
            time.sleep(0.001)

    outcomes: list[Stage] = []
    items = [Item(1, Position(), mark=Mark.END)]
    with worker_of(run, spec) as worker, closing(OutputLink(spec, run="run")) as output:

        def serve() -> None:
            reports.connect(output)
            stream = Listed(items)
            server = worker.server(stream=stream, output=Fanout([[output]]), neighbours=reports)
            outcomes.append(server.serve())

        serving = threading.Thread(target=serve)
        with closing(InputLink(below, run="run")) as input:
            address = input.bind(f"ipc://{run.root}/1.sock")
            Endpoint(module=below.module, address=address, attempt=1).write(run.endpoint("b"))
            says(1, "running")
            serving.start()
            until_end(input)
            serving.join(1)  # much longer than it may take to stop
            assert serving.is_alive()
            says(1, "failed")
        try:
            serving.join(1)
            with closing(InputLink(below, run="run", restarted=True)) as again:
                address = again.bind(f"ipc://{run.root}/2.sock")
                Endpoint(module=below.module, address=address, attempt=2).write(run.endpoint("b"))
                says(2, "running")
                until_end(again)
                again.ack(1)
                assert again.finish(10)
                serving.join(10)
        finally:
            worker.stop._handle(signal.SIGTERM, None)
            serving.join(30)
    assert outcomes == [Stage.FINISHED]


FULL = """\
name: full
data: {dataset: digits, flatten: true, batch_size: 16}
stop_grace_s: 0.5
defaults: {interface: mixed}
""" + linear(64, 8, 8, 10)


def test_a_restarted_head_is_answered_while_there_is_no_room_downstream(run: RunDir) -> None:
    """In a graph, downstream may wait for that head before it makes room."""
    chain = parse_chain(FULL)
    a, b, c = worker_specs(chain, describe(chain.data, Path()))
    with (
        worker_of(run, b) as worker,
        closing(InputLink(b, run="run")) as input,
        closing(OutputLink(b, run="run")) as output,
        closing(InputLink(c, run="run")) as full,
    ):
        address = input.bind(f"ipc://{run.root}/b.sock")
        below = full.bind(f"ipc://{run.root}/c.sock")

        def serve() -> None:
            output.connect(below, deadline_s=10)
            worker.server(input=Join([[input]]), output=Fanout([[output]])).serve()

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            full.wait_for_peer(10)
            with closing(OutputLink(a, run="run")) as head:
                head.connect(address, deadline_s=10)
                until_s = time.monotonic() + 20
                id = 0
                while worker.metrics.doing != "window" or head.room:
                    assert time.monotonic() < until_s
                    if head.room:
                        id += 1
                        h, y = torch.randn(16, 8), torch.randint(0, 10, (16,))
                        head.send_batch(Batch(id, 1, Mode.TRAIN, (), y), h)
                    list(head.receive())
                    time.sleep(0.01)
            with closing(OutputLink(a, run="run", next_id=id + 1)) as restarted:
                restarted.connect(address, deadline_s=10)
                assert restarted.connected
        finally:
            worker.stop._handle(signal.SIGTERM, None)
            serving.join(30)
