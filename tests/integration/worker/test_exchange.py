"""Replicas that share over links, and are restarted alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dni_runtime.core.step import ModuleStep
from dni_runtime.link import InputLink, Marker, OutputLink
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Mark
from dni_runtime.worker.checkpoint import State, copy_state, restore
from dni_runtime.worker.exchange import Exchange, Pushes, exchange_spec
from tests.replicas import learn, replicas, shared

FULL = Mark.SYNC | Mark.EPOCH


class Replica:
    """One attempt of a replica; the first one listens, the others connect to it."""

    def __init__(
        self, spec: WorkerSpec, folder: Path, state: State | None = None, *, cut: int = 0
    ) -> None:
        self.step = ModuleStep(spec)
        restarted = state is not None
        if state is not None:
            restore(self.step, *state)
        part = shared(self.step)
        self.spec = exchange_spec(spec, part.words)
        inputs = [
            InputLink(self.spec, edge, run="run", received=cut, restarted=restarted)
            for edge in self.spec.sources
        ]
        self.addresses = {
            edge.source: link.bind(f"ipc://{folder}/{edge.source}")
            for edge, link in zip(self.spec.sources, inputs, strict=True)
        }
        kind = Exchange if part.strategy.waits else Pushes
        self.exchange = kind(
            part, inputs=inputs, done=cut, gone=lambda name: False, restarted=restarted
        )

    def connect(self, first: Replica) -> None:
        """Meet the first one, which may be a new attempt of it."""
        output, (edge,) = self.exchange.output, self.spec.targets
        address = first.addresses[edge.source]
        if output is None:
            output = self.exchange.output = OutputLink(self.spec, edge, run="run")
            output.connect(address, deadline_s=10, stop=lambda: bool(first.exchange.listen()))
        else:
            output.move(address, None)

    def learn(self, id: int, truth: Tensor) -> None:
        for n in range(10):
            x = torch.randn(16, 8)
            learn(self.step, 1000 * id + n, x, x @ truth)

    def row(self) -> Tensor:
        return shared(self.step).row()


def share(replicas: list[Replica], id: int, mark: Mark = Mark.SYNC) -> None:
    """Let all share at a marker."""
    for replica in replicas:
        replica.exchange.begin(Marker(id, 1, mark))
    finish(replicas)


def finish(replicas: list[Replica]) -> None:
    left, until_s = list(replicas), time.monotonic() + 20
    while left := [replica for replica in left if not replica.exchange.done()]:
        assert time.monotonic() < until_s, [replica.spec.module for replica in left]
        time.sleep(0.001)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("who", "points"), [(0, (4, 5)), (1, (4,))])
def test_what_cannot_be_read_after_a_restart_is_sent_whole(
    who: int, points: tuple[int, ...], opened: ExitStack, tmp_path: Path
) -> None:
    """Its own weights are older than those of the others, but what has been learnt is not lost."""
    given = replicas("local-sgd, every: 4, compression: int8", 2)
    all = [Replica(spec, tmp_path) for spec in given]
    for replica in all:
        opened.enter_context(closing(replica.exchange))
    all[1].connect(all[0])
    share(all, 1)
    kept = copy_state(all[who].step)
    for id in (2, 3):
        all[1 - who].learn(id, torch.randn(8, 6))
        share(all, id)
    all[who].exchange.close()
    all[who] = Replica(given[who], tmp_path, kept, cut=1)
    opened.enter_context(closing(all[who].exchange))
    all[1].connect(all[0])
    all[1].learn(4, torch.randn(8, 6))
    learnt = all[1].row()
    for id in points:
        share(all, id)
    assert torch.equal(all[0].row(), all[1].row())
    assert torch.allclose(all[0].row(), learnt, atol=0.1)


def test_a_restarted_parameter_server_answers_at_the_point_where_others_wait(
    opened: ExitStack, tmp_path: Path
) -> None:
    """It passes earlier ones before, and learns until then: all are to have the same there."""
    given = replicas("parameter-server", 3)
    all = [Replica(spec, tmp_path) for spec in given]
    for replica in all:
        opened.enter_context(closing(replica.exchange))
    for replica in all[1:]:
        replica.connect(all[0])
    share(all, 50, FULL)
    kept = copy_state(all[0].step)
    share(all, 60, FULL)
    all[1].learn(61, torch.randn(8, 6))
    for replica in all[1:]:
        replica.exchange.begin(Marker(100, 1, FULL))
    all[0].exchange.close()
    all[0] = Replica(given[0], tmp_path, kept, cut=50)
    opened.enter_context(closing(all[0].exchange))
    for replica in all[1:]:
        replica.connect(all[0])
    until_s = time.monotonic() + 20
    while any(link.received < 100 for link in all[0].exchange.inputs):
        assert time.monotonic() < until_s
        for replica in all:
            replica.exchange.done()
    share(all[:1], 60, FULL)
    all[0].learn(61, torch.randn(8, 6))
    all[0].exchange.begin(Marker(100, 1, FULL))
    finish(all)
    assert torch.equal(all[1].row(), all[0].row())
    assert torch.equal(all[2].row(), all[0].row())
