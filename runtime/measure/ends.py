"""The two ends of a measured link: the one that modules use, with its window and its checks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

from dni_runtime.errors import DniError, WorkerError
from dni_runtime.link import Batch, InputLink, OutputLink, listen_address
from dni_runtime.run.keys import KnownKeys
from dni_runtime.spec import Choice, EdgeSpec, LayerSpec, LinksSpec, TensorSpec, WorkerSpec
from dni_runtime.wire import Mode

_DEADLINE_S = 60.0
_FIRST_PINGS = 50
_LEAST = 20  # minimum number of timed messages
_PINGS = 300
_RUN = "bench"


@dataclass(frozen=True)
class Job:
    """Settings of one measurement, the same in both processes."""

    bytes: int  # of a batch's activation
    links: LinksSpec  # the sink's address, encryption and window
    latency: bool  # send batches one at a time

    @property
    def floats(self) -> int:
        return self.bytes // 4

    @property
    def discard(self) -> int:
        """Batches that are not timed: more than fit into windows and the kernel's buffers."""
        return _FIRST_PINGS if self.latency else self.links.window + 16

    def listen_address(self, folder: Path) -> str:
        """Return the address where the sink listens; ``folder`` is for ipc."""
        address = listen_address(self.links, 1, folder, "sink")
        if address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        return address


def _spec(job: Job, module: str) -> WorkerSpec:
    """Return the spec of one of two modules whose link carries batches of one sample each."""
    tensor = TensorSpec(shape=(job.floats,), dtype="float32")
    link = EdgeSpec(source="source", target="sink", number=1, tensor=tensor, gradients=0)
    head = module == "source"
    return WorkerSpec(
        chain="bench",
        module=module,
        index=0 if head else 1,
        layers=(LayerSpec(type="Identity"),),
        optimizer=Choice(name="SGD"),
        loss=Choice(name="MSELoss"),
        seed=0,
        sources=() if head else (link,),
        targets=(link,) if head else (),
        output=tensor,
        label=TensorSpec(shape=(), dtype="int64"),
        prediction=tensor,
        classes=None,
        batch_limit=1,
        gradients_in=0,
        late=0,
        links=job.links,
        keep=1,
        stop_grace_s=5.0,
        head=None,
        tail=None,
    )


class Source:
    def __init__(self, job: Job, address: str, keys: KnownKeys) -> None:
        self._link = OutputLink(_spec(job, "source"), run=_RUN, keys=keys)
        try:
            self._link.connect(address, deadline_s=job.links.connect_timeout_s)
        except DniError:
            self._link.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._h = torch.randn(1, job.floats)
        self._id = 0

    def send(self, *, last: bool = False) -> None:
        """Send a batch, as soon as there is room for it."""
        self._wait(lambda: self._link.room)
        self._id += 1
        batch = Batch(self._id, 0, Mode.TRAIN, (), torch.tensor([int(last)]))
        self._link.send_batch(batch, self._h)

    def settle(self) -> None:
        """Wait until all that was sent has been acknowledged."""
        self._wait(lambda: not self._link.in_flight)

    def _wait(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + _DEADLINE_S
        self._link.receive()
        while not done():
            if time.monotonic() > until:
                raise _stuck()
            self._poller.poll(1000)
            self._link.receive()

    def close(self) -> None:
        self._link.finish(1.0)
        self._link.close()


class Sink:
    """The receiving end, which listens at ``address``."""

    def __init__(self, job: Job, folder: Path, keys: KnownKeys) -> None:
        self._link = InputLink(_spec(job, "sink"), run=_RUN, keys=keys)
        self.address = self._link.bind(job.listen_address(folder))
        self._wait_s = job.links.connect_timeout_s
        self._poller = zmq.Poller()
        self._poller.register(self._link.socket, zmq.POLLIN)

    def take(self) -> bool:
        """Wait for a batch and acknowledge it; return whether others follow."""
        if not self._link.connected:
            self._link.wait_for_peer(self._wait_s)
        until = time.monotonic() + _DEADLINE_S
        while not isinstance(batch := self._link.receive(), Batch):
            if time.monotonic() > until:
                raise _stuck()
            self._poller.poll(1000)
        self._link.ack(batch.id)
        return not batch.y

    def close(self) -> None:
        self._link.finish(1.0)
        self._link.close()


def _stuck() -> WorkerError:
    return WorkerError(f"nothing has arrived for {_DEADLINE_S:.0f} s")


def send(source: Source, job: Job, seconds: float) -> dict[str, float]:
    """Send a job's batches for at least ``seconds``; for latency time their round trips.

    ``round_trip_us`` and ``round_trip_p99_us`` are from sending a batch to its acknowledgement.
    """
    trips, sent = [], 0
    least = job.discard + (_PINGS if job.latency else _LEAST)
    until = time.perf_counter() + seconds
    while sent < least or time.perf_counter() < until:
        began = time.monotonic_ns()
        source.send()
        sent += 1
        if job.latency:
            source.settle()
            trips.append(time.monotonic_ns() - began)
    source.send(last=True)
    source.settle()
    if not job.latency:
        return {}
    trips = trips[job.discard :]
    return {
        "round_trip_us": statistics.median(trips) / 1000,
        "round_trip_p99_us": statistics.quantiles(trips, n=100)[-1] / 1000,
    }


def receive(sink: Sink, job: Job) -> float:
    """Receive a job's batches; return the megabytes (1e6 bytes) per second."""
    for _ in range(job.discard):
        sink.take()
    began, batches = time.perf_counter(), 1  # the last one has been waited for, too
    while sink.take():
        batches += 1
    return job.bytes * batches / (time.perf_counter() - began) / 1e6
