"""The two ends of a measured link, and of bare ZeroMQ for comparison.

The link is the one that modules use, with its window, acknowledgements and checks. Bare ZeroMQ is a
pair of sockets with the same high-water mark that sends one frame without copying it. Both yield a
tensor over the received memory, and both are encrypted if the job requires it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
import zmq

from dni_runtime.errors import DniError, WorkerError
from dni_runtime.keys import KnownKeys
from dni_runtime.link import Batch, InputLink, OutputLink, listen_address, sockets
from dni_runtime.spec import Choice, EdgeSpec, LayerSpec, LinksSpec, TensorSpec, WorkerSpec
from dni_runtime.wire import Mode

Kind = Literal["link", "raw"]
Security = Literal["none", "curve"]

LAST = -1
"""The label of a job's last batch."""

_DEADLINE_S = 60.0
_FIRST_PINGS = 50
_LEAST = 20  # minimum number of timed messages
_PINGS = 300
_RUN = "bench"


@dataclass(frozen=True)
class Job:
    """Settings of one measurement, the same in both processes."""

    kind: Kind
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


class End(Protocol):
    """One of the two ends."""

    def close(self) -> None:
        """Close its socket."""


Opened = TypeVar("Opened", bound=End)


class Source(End, Protocol):
    """The sending end."""

    def send(self, label: int) -> None:
        """Send a batch, as soon as there is room for it."""

    def settle(self) -> None:
        """Wait until all that was sent has been taken."""


class Sink(End, Protocol):
    """The receiving end."""

    address: str

    def take(self) -> int:
        """Wait for a batch, acknowledge it, and return its label."""


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
        interface=None,
        optimizer=Choice(name="SGD"),
        schedule=None,
        schedule_every="epoch",
        loss=Choice(name="MSELoss"),
        seed=0,
        device="cpu",
        precision="float32",
        cpus=1,
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


class LinkSource:
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

    def send(self, label: int) -> None:
        self._wait(lambda: self._link.room)
        self._id += 1
        self._link.send_batch(self._id, 0, Mode.TRAIN, self._h, torch.tensor([label]))

    def settle(self) -> None:
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


class LinkSink:
    def __init__(self, job: Job, folder: Path, keys: KnownKeys) -> None:
        self._link = InputLink(_spec(job, "sink"), run=_RUN, keys=keys)
        self.address = self._link.bind(job.listen_address(folder))
        self._wait_s = job.links.connect_timeout_s
        self._poller = zmq.Poller()
        self._poller.register(self._link.socket, zmq.POLLIN)

    def take(self) -> int:
        if not self._link.connected:
            self._link.wait_for_peer(self._wait_s)
        until = time.monotonic() + _DEADLINE_S
        while not isinstance(batch := self._link.receive(), Batch):
            if time.monotonic() > until:
                raise _stuck()
            self._poller.poll(1000)
        self._link.ack(batch.id)
        return int(batch.y)

    def close(self) -> None:
        self._link.finish(1.0)
        self._link.close()


class RawSource:
    def __init__(self, job: Job, address: str, keys: KnownKeys) -> None:
        self._context, self._socket = _pair(job.links.window)
        if job.links.security == "curve":
            sockets.encrypt_output(self._socket, keys.own, keys.publics["sink"])
        self._socket.connect(address)
        self._latency = job.latency
        self._h = torch.randn(job.floats)
        self._buffer = self._h.numpy().data

    def send(self, label: int) -> None:
        try:
            if label == LAST:
                self._socket.send(b"")
            elif self._latency:  # nothing else reads the tensor now
                self._h[:2].view(torch.int64)[0] = label
                self._socket.send(self._h.numpy().tobytes())
            else:
                self._socket.send(self._buffer, copy=False)
        except zmq.Again:
            raise _stuck() from None

    def settle(self) -> None:
        try:
            self._socket.recv()
        except zmq.Again:
            raise _stuck() from None

    def close(self) -> None:
        _close(self._context, self._socket)


class RawSink:
    def __init__(self, job: Job, folder: Path, keys: KnownKeys) -> None:
        self._context, self._socket = _pair(job.links.window)
        if job.links.security == "curve":
            # without a list of allowed keys: only the encryption is measured
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self._socket.bind(job.listen_address(folder))
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._latency = job.latency

    def take(self) -> int:
        frame = self._socket.recv(copy=False)
        if not len(frame):
            self._socket.send(b"")
            return LAST
        h = torch.frombuffer(frame.buffer, dtype=torch.float32)
        if not self._latency:
            return 0
        label = int(h[:2].view(torch.int64))
        self._socket.send(b"")
        return label

    def close(self) -> None:
        _close(self._context, self._socket)


def _pair(window: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(window)
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        socket.setsockopt(option, int(1000 * _DEADLINE_S))
    return context, socket


def _close(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
    socket.close(linger=1000)
    context.term()


def _stuck() -> WorkerError:
    return WorkerError(f"nothing has arrived for {_DEADLINE_S:.0f} s")


@contextlib.contextmanager
def opened(make: Callable[..., Opened], *arguments: Any) -> Iterator[Opened]:
    """Create an end, and close it afterwards."""
    end = make(*arguments)
    try:
        yield end
    finally:
        end.close()


def send(source: Source, job: Job, seconds: float) -> dict[str, float]:
    """Send a job's batches for at least ``seconds``, and time it at this end.

    For latency: ``round_trip_us`` and ``round_trip_p99_us``, from sending a batch to its
    acknowledgement; else ``source_cpu_us`` of CPU per batch.
    """
    trips, sent = [], 0
    least = job.discard + (_PINGS if job.latency else _LEAST)
    cpu_s, until = time.process_time(), time.perf_counter() + seconds
    while sent < least or time.perf_counter() < until:
        began = time.monotonic_ns()
        source.send(began)
        sent += 1
        if job.latency:
            source.settle()
            trips.append(time.monotonic_ns() - began)
    source.send(LAST)
    source.settle()
    if not job.latency:
        return {"source_cpu_us": (time.process_time() - cpu_s) / sent * 1e6}
    trips = trips[job.discard :]
    return {
        "round_trip_us": statistics.median(trips) / 1000,
        "round_trip_p99_us": statistics.quantiles(trips, n=100)[-1] / 1000,
    }


def receive(sink: Sink, job: Job) -> dict[str, float]:
    """Receive a job's batches, and time it at this end.

    For latency: ``latency_us``, the median one way, valid if both ends share a clock; else
    ``mb_per_s`` (1e6 bytes) and ``sink_cpu_us`` of CPU per batch.
    """
    if job.latency:
        trips: list[int] = []
        while (label := sink.take()) != LAST:
            trips.append(time.monotonic_ns() - label)
        return {"latency_us": statistics.median(trips[job.discard :]) / 1000}
    for _ in range(job.discard):
        sink.take()
    began, cpu_s, batches = time.perf_counter(), time.process_time(), 0
    while sink.take() != LAST:
        batches += 1
    return {
        "mb_per_s": job.bytes * batches / (time.perf_counter() - began) / 1e6,
        "sink_cpu_us": (time.process_time() - cpu_s) / batches * 1e6,
    }
