"""A process group's beginning: the store in a folder, what is refused, and a wait that ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from select import select

import pytest
import torch
import torch.distributed as dist

from dni_runtime.core.replication import ReplicaMessage
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DniError, UnavailableError, UsageError, WorkerError
from dni_runtime.link import Marker
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import LinksSpec, WorkerSpec
from dni_runtime.wire import Mark
from dni_runtime.worker.group import Collective, FolderStore, Group
from dni_runtime.worker.options import start_of
from dni_runtime.worker.signals import StopRequest
from tests.conftest import eventually
from tests.replicas import replicas, shared

CPU = torch.device("cpu")


def spec(backend: str = "gloo") -> WorkerSpec:
    return replicas(f"all-reduce, backend: {backend}")[1]


def test_a_value_is_waited_for(tmp_path: Path) -> None:
    """Through torch's own wrapper, as a backend uses it; keys may be no names of files."""
    ends = [FolderStore(tmp_path, threading.Event()) for _ in range(2)]
    one, other = (dist.PrefixStore("a/b", end) for end in ends)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(one.get, "rank//0")
        assert not other.check(["rank//0"])
        other.set("rank//0", b"\0here")
        assert waiting.result(10) == b"\0here"
    one.wait(["rank//0"], timedelta(seconds=1))
    assert one.check(["rank//0"])


def test_a_wait_ends_with_the_worker(tmp_path: Path) -> None:
    over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(FolderStore(tmp_path, over).get, "never")
        over.set()
        with pytest.raises(WorkerError, match="before its process group is complete"):
            waiting.result(10)


def test_what_a_group_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def group() -> Group:
        step, run = ModuleStep(spec("nccl")), RunDir(tmp_path)
        return Group(shared(step), step.spec, run, begun=1, device=CPU, links=LinksSpec())

    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    with pytest.raises(UnavailableError, match=r"this torch \(.*\) has no backend 'nccl'"):
        group()
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    with pytest.raises(UnavailableError, match=r"needs a GPU, and 'b.2' runs on cpu"):
        group()


def test_ranks_must_know_which_group_is_theirs() -> None:
    with pytest.raises(UsageError, match=r"'b\.2' must know which start"):
        start_of(spec(), None)
    assert start_of(spec(), 7) == 7
    assert start_of(replicas("all-reduce")[1], None) == 0


class Alone(Group):
    """A group of one."""

    def __init__(self, *, error: DniError | None = None) -> None:
        self.sent, self.goes_on, self._error = 8, threading.Event(), error

    def form(self) -> None:
        if self._error is not None:
            raise self._error

    def mean(self, offer: ReplicaMessage) -> ReplicaMessage:
        assert self.goes_on.wait(10)
        return offer

    def close(self) -> None:
        self.goes_on.set()


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    found = StopRequest()
    yield found
    found.close()


def test_a_mean_wakes_the_worker_up(stop: StopRequest) -> None:
    group, step = Alone(), ModuleStep(spec())
    exchange = Collective(shared(step), group, stop)
    assert not exchange.done(), "nothing is shared yet"
    exchange.begin(Marker(4, 1, Mark.SYNC))
    assert not exchange.done()
    assert not select([stop.wakeup], [], [], 0)[0]
    group.goes_on.set()
    assert select([stop.wakeup], [], [], 10)[0]
    eventually("the mean is taken", exchange.done)
    assert not select([stop.wakeup], [], [], 0)[0], "else the worker would not sleep again"
    assert (exchange.sent, exchange.links) == (8, ())
    assert not exchange.done()
    exchange.close()


def test_a_group_that_cannot_be_formed_ends_the_worker_at_once(stop: StopRequest) -> None:
    group = Alone(error=UnavailableError("no interface"))
    exchange = Collective(shared(ModuleStep(spec())), group, stop)
    with pytest.raises(UnavailableError, match="no interface"):
        eventually("an error", exchange.done)
    exchange.close()
