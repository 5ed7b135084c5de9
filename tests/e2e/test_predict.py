"""Worker processes that only predict, and a front that asks them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dni_runtime.data import describe
from dni_runtime.files import write_atomic
from dni_runtime.link import Batch
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.keys import RunKeys
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.load import parse_chain
from dni_runtime.spec.predicting import FRONT, predicting
from dni_runtime.spec.replicas import modules_of
from dni_runtime.wire import Mode
from dni_runtime.worker.links import Attempt, WorkerLinks
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import WorkerStart
from tests.e2e.workers import Chain

BRANCHES = """
name: branches
epochs: 1
data: {dataset: digits, batch_size: 8, flatten: true}
loss: CrossEntropyLoss
defaults: {optimizer: {SGD: {lr: 0.1}}}
links: {window: 4}
modules:
  - name: stem
    layers: [{Linear: {in_features: 64, out_features: 16}}, {BatchNorm1d: {num_features: 16}}]
  - name: left
    inputs: [stem]
    layers: [{Linear: {in_features: 16, out_features: 8}}, ReLU, {Dropout: {p: 0.5}}]
  - name: right
    inputs: [stem, data.0]
    layers: [{Bilinear: {in1_features: 16, in2_features: 64, out_features: 8}}, Tanh]
  - name: tail
    inputs: [left, right]
    layers: [{Bilinear: {in1_features: 8, in2_features: 8, out_features: 10}}]
"""


class Network(nn.Module):
    """The same network by hand, with any weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16))
        self.left = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5))
        self.right = nn.Sequential(nn.Bilinear(16, 64, 8), nn.Tanh())
        self.tail = nn.Sequential(nn.Bilinear(8, 8, 10))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        right = self.right[1](self.right[0](h, x))
        return self.tail[0](self.left(h), right)


class Served(Chain):
    """Workers that predict, and the front, which is this process."""

    def __init__(self, root: Path, network: nn.Module) -> None:
        chain = parse_chain(BRANCHES)
        super().__init__(root, chain)
        specs = predicting(modules_of(worker_specs(chain, describe(chain.data, Path()))))
        self.front, *self.workers = (spec.model_copy(update={"initial": True}) for spec in specs)
        for worker in self.workers:
            write_atomic(self.run.spec(worker.module), worker.to_json())
            weights = self.run.initial(worker.module)
            weights.parent.mkdir(exist_ok=True)
            save_file(getattr(network, worker.module).state_dict(), weights)
        self.start()
        options = WorkerStart(run=str(root), module=FRONT, attempt=1)
        keys, self.stop = RunKeys(self.run, FRONT), StopRequest()
        metrics = MetricsWriter(self.run, self.front, 1)
        attempt = Attempt(options, self.front, self.run, metrics, self.stop, keys)
        self.links = WorkerLinks(attempt, Start())
        self.links.listen()
        assert self.links.meet()
        self.sent = 0

    def ask(self, x: Tensor) -> int:
        self.sent += 1
        batch = Batch(self.sent, 0, Mode.PREDICT, (), torch.empty(len(x), 0), data=(x,))
        assert self.links.output is not None
        self.links.output.send_batch(batch, x)
        return self.sent

    def answer(self) -> tuple[int, Tensor] | None:
        assert self.links.output is not None
        assert self.links.input is not None
        for link in self.links.output.links:
            self.links.neighbours.look(link)
        self.links.output.receive()
        item = self.links.input.receive()
        if item is None:
            time.sleep(0.001)
            return None
        assert isinstance(item, Batch)
        self.links.input.ack(item.id)
        return item.id, item.xs[0].clone()

    def close(self) -> None:
        self.links.close()
        self.stop.close()
        for process in self.processes.values():
            process.kill()


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(3)
    network = Network()
    with torch.no_grad():
        network(torch.randn(64, 64))  # BatchNorm's statistics
    return network.eval()


@pytest.fixture
def served(tmp_path: Path, network: nn.Module) -> Iterator[Served]:
    served = Served(tmp_path, network)
    yield served
    served.close()


def test_answers_are_those_of_the_whole_network(served: Served, network: nn.Module) -> None:
    """Also of what a module that is killed had not answered, each once and in its order."""
    generator = torch.Generator().manual_seed(0)
    asked: dict[int, Tensor] = {}
    answered: list[int] = []
    killed = False
    end_s = time.monotonic() + 120
    assert served.links.output is not None
    while len(answered) < 60:
        assert time.monotonic() < end_s, served.logs()
        # without room it would be told that the batch is left out
        if len(asked) < 60 and len(asked) - len(answered) < 6 and served.links.output.room:
            x = torch.randn(1 + len(asked) % 8, 64, generator=generator)
            asked[served.ask(x)] = x
        got = served.answer()
        if got is not None:
            id, y = got
            answered.append(id)
            torch.testing.assert_close(y, network(asked[id]), atol=1e-5, rtol=1e-5)
        if len(answered) == 20 and not killed:
            served.processes["left"].kill()
            served.processes["left"].wait(30)
            killed = True
            served.start_one("left", "--resume", "own", attempt=2)
    assert answered == list(range(1, 61))
    for process in served.processes.values():
        os.kill(process.pid, signal.SIGTERM)
    assert set(served.wait().values()) == {75}
    reports = [Report.read(served.run.worker(name)) for name in served.names]
    assert [one.state for one in reports] == ["stopped"] * 4


def test_a_spec_that_predicts_has_neither_labels_nor_gradients() -> None:
    chain = parse_chain(BRANCHES)
    trained = modules_of(worker_specs(chain, describe(chain.data, Path())))
    front, *modules = predicting(trained)
    assert [one.trained for one in modules] == [one.hash for one in trained]
    assert [edge.target for edge in front.targets] == ["stem", "right"]
    assert [edge.source for edge in front.sources] == ["tail"]
    edges = [edge for one in (front, *modules) for edge in (*one.sources, *one.targets)]
    assert len({edge.number for edge in edges}) == 7
    assert not any(edge.labelled or edge.gradients for edge in edges)
    again = WorkerSpec.from_json(modules[0].to_json())
    assert again.link_hash(again.sources[0]) == front.link_hash(front.targets[0])
