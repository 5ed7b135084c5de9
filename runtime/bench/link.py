"""One link between two processes: bytes a second and latency, beside bare ZeroMQ.

What is measured is in ``ends``. The receiver is a process of its own: this module as a program.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, Self

import torch

from dni_runtime.bench.ends import (
    LAST,
    Job,
    Kind,
    LinkSink,
    LinkSource,
    RawSink,
    RawSource,
    Security,
    Sink,
    Source,
    opened,
)
from dni_runtime.bench.spread import Spread, ratios
from dni_runtime.errors import UsageError, WorkerError
from dni_runtime.link.keys import KeyPair, KnownKeys

Transport = Literal["ipc", "tcp"]

SMALL_BYTES = 1024
"""The message whose latency is measured."""

_KINDS: tuple[Kind, ...] = ("link", "raw")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_LARGEST = 1 << 30
_LEAST = 20  # messages that are timed at least
_PINGS = 300


@dataclass(frozen=True)
class Throughput:
    """Batches of one size in one direction.

    Attributes:
        transport: ``ipc`` or ``tcp`` (loopback).
        security: Whether it is encrypted.
        bytes: Size of a batch's activation.
        link: Megabytes (1e6) a second through the link.
        raw: The same through bare ZeroMQ.
        ratio: Link over bare ZeroMQ, within a repetition.
        of_plain: An encrypted link over one that is not, within a repetition; None for others.
        source_cpu_us: CPU microseconds of the link's sender for one batch, ZeroMQ's thread too.
        sink_cpu_us: The same of its receiver.
    """

    transport: Transport
    security: Security
    bytes: int
    link: Spread
    raw: Spread
    ratio: Spread
    of_plain: Spread | None
    source_cpu_us: Spread
    sink_cpu_us: Spread


@dataclass(frozen=True)
class Latency:
    """Small batches, one at a time, from being sent to being a tensor at the other end.

    Attributes:
        transport: ``ipc`` or ``tcp`` (loopback).
        security: Whether it is encrypted.
        bytes: Size of a batch's activation.
        link: Microseconds through the link, one way.
        raw: The same through bare ZeroMQ.
        ratio: Link over bare ZeroMQ, within a repetition.
        of_plain: An encrypted link over one that is not, within a repetition; None for others.
    """

    transport: Transport
    security: Security
    bytes: int
    link: Spread
    raw: Spread
    ratio: Spread
    of_plain: Spread | None


def parse_size(text: str) -> int:
    """Bytes of ``64KB``, ``1MB`` or ``4096`` (KB is 1024 bytes).

    Raises:
        UsageError: It is no size, or one that no float32 tensor has.
    """
    number, unit = text.strip().upper(), "B"
    for name in sorted(_UNITS, key=len, reverse=True):
        if number.endswith(name):
            number, unit = number.removesuffix(name).strip(), name
            break
    try:
        size = float(number) * _UNITS[unit]
    except ValueError:
        size = 0.0
    if not (4 <= size <= _LARGEST and size % 4 == 0):
        raise UsageError(
            f"{text!r} is no size of a batch",
            hint="write 64KB, 1MB or 16MB: multiples of 4 bytes, up to 1GB",
        )
    return int(size)


def measure_links(
    sizes: Sequence[int],
    transports: Sequence[Transport],
    *,
    securities: Sequence[Security] = ("none",),
    repetitions: int,
    seconds: float,
    window: int,
    observe: Callable[[str], None] | None = None,
) -> tuple[list[Throughput], list[Latency]]:
    """Measure the link and bare ZeroMQ in turns.

    Args:
        sizes: Bytes of a batch.
        transports: Which transports.
        securities: Whether they are encrypted; ipc never is.
        repetitions: How often each is measured.
        seconds: How long each time, at least; more where few batches fit in.
        window: Unacknowledged batches, and bare ZeroMQ's high-water mark.
        observe: Told what was measured, as it goes.

    Raises:
        WorkerError: The receiver failed.
    """
    torch.set_num_threads(1)
    ways = [
        (transport, security)
        for transport in transports
        for security in securities
        if transport == "tcp" or security == "none"
    ]
    found: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
    with _Receiver() as receiver, tempfile.TemporaryDirectory(prefix="dni-") as folder:
        for repetition in range(repetitions):
            for transport, security in ways:
                address = f"ipc://{folder}/link" if transport == "ipc" else "tcp://127.0.0.1:*"
                for size in (0, *sizes):  # 0: the small ones' latency
                    # Who comes first changes, so that neither always follows the other.
                    for kind in _KINDS[:: -1 if repetition % 2 else 1]:
                        nbytes = size or SMALL_BYTES
                        job = Job(kind, address, nbytes, window, security, latency=size == 0)
                        for name, value in _run(receiver, job, seconds).items():
                            found[transport, security, size, f"{kind} {name}"].append(value)
                if observe is not None:
                    observe(f"{repetition + 1}/{repetitions} {transport}, {security}")

    def spread(way: tuple[str, str], size: int, name: str) -> Spread:
        return Spread.of(found[*way, size, name])

    def ratio(way: tuple[str, str], size: int, name: str) -> Spread:
        both = [found[*way, size, f"{kind} {name}"] for kind in _KINDS]
        return Spread.of(ratios(*both))

    def of_plain(way: tuple[str, str], size: int, name: str) -> Spread | None:
        transport, security = way
        if security == "none" or (transport, "none") not in ways:
            return None
        both = [found[transport, one, size, f"link {name}"] for one in (security, "none")]
        return Spread.of(ratios(*both))

    throughputs = [
        Throughput(
            *way,
            bytes=size,
            link=spread(way, size, "link mb_per_s"),
            raw=spread(way, size, "raw mb_per_s"),
            ratio=ratio(way, size, "mb_per_s"),
            of_plain=of_plain(way, size, "mb_per_s"),
            source_cpu_us=spread(way, size, "link source_cpu_us"),
            sink_cpu_us=spread(way, size, "link sink_cpu_us"),
        )
        for way in ways
        for size in sizes
    ]
    latencies = [
        Latency(
            *way,
            bytes=SMALL_BYTES,
            link=spread(way, 0, "link latency_us"),
            raw=spread(way, 0, "raw latency_us"),
            ratio=ratio(way, 0, "latency_us"),
            of_plain=of_plain(way, 0, "latency_us"),
        )
        for way in ways
    ]
    return throughputs, latencies


def _run(receiver: _Receiver, job: Job, seconds: float) -> dict[str, float]:
    """Send what a job says; what was measured at both ends."""
    own = KeyPair.new()
    job = replace(job, source_key=own.public.decode())
    address, sink_key = receiver.begin(job)
    keys = KnownKeys(own, {"sink": sink_key})
    make: Callable[..., Source] = LinkSource if job.kind == "link" else RawSource
    with opened(make, job, address, keys) as source:
        if job.latency:
            for _ in range(job.discard + _PINGS):
                source.send(time.monotonic_ns())
                source.settle()
            source.send(LAST)
            source.settle()
            return receiver.end()
        sent, cpu_s = 0, time.process_time()
        until = time.perf_counter() + seconds
        while sent < job.discard + _LEAST or time.perf_counter() < until:
            source.send(0)
            sent += 1
        source.send(LAST)
        source.settle()
        cpu_s = time.process_time() - cpu_s
        answer = receiver.end()
    return {
        "mb_per_s": job.bytes * answer["batches"] / answer["seconds"] / 1e6,
        "source_cpu_us": cpu_s / sent * 1e6,
        "sink_cpu_us": answer["cpu_s"] / answer["batches"] * 1e6,
    }


def _receive(sink: Sink, job: Job) -> dict[str, float]:
    """Take what a job sends, and time it."""
    if job.latency:
        trips: list[int] = []
        while (label := sink.take()) != LAST:
            trips.append(time.monotonic_ns() - label)  # one clock for both processes
        return {"latency_us": Spread.of(trips[job.discard :]).median / 1000}
    for _ in range(job.discard):
        sink.take()
    began, cpu_s, batches = time.perf_counter(), time.process_time(), 0
    while sink.take() != LAST:
        batches += 1
    return {
        "batches": batches,
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_s,
    }


class _Receiver:
    """The other process, which takes one job after the other."""

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dni_runtime.bench.link"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._log.close()

    @property
    def _in(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _out(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def begin(self, job: Job) -> tuple[str, bytes]:
        """Let it receive what a job sends; gives the address to send it to, and its key."""
        try:
            self._in.write(json.dumps(vars(job)) + "\n")
            self._in.flush()
        except BrokenPipeError:
            pass  # the answer will not come either
        answer = self._answer()
        return str(answer["address"]), str(answer["public_key"]).encode()

    def end(self) -> dict[str, float]:
        """What it measured."""
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._out.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        self._log.seek(0)
        lines = [text for text in self._log.read().splitlines() if text.strip()]
        raise WorkerError(f"the receiving process failed: {lines[-1] if lines else 'no message'}")


def _serve() -> None:
    """What the receiving process does: jobs come in, as JSON lines, measurements go out."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if job.address.startswith("ipc://"):
            Path(job.address.removeprefix("ipc://")).unlink(missing_ok=True)
        keys = KnownKeys(KeyPair.new(), {"source": job.source_key.encode()})
        make: Callable[..., Sink] = LinkSink if job.kind == "link" else RawSink
        with opened(make, job, keys) as sink:
            begun = {"address": sink.address, "public_key": keys.own.public.decode()}
            print(json.dumps(begun), flush=True)
            print(json.dumps(_receive(sink, job)), flush=True)


if __name__ == "__main__":
    _serve()
