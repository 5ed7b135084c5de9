"""One link between two processes: throughput and latency, compared with bare ZeroMQ.

``ends`` implements what is measured. The receiver is a separate process (``peer``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dni_runtime.bench.ends import (
    Job,
    Kind,
    LinkSource,
    RawSource,
    Security,
    Source,
    opened,
    send,
)
from dni_runtime.bench.peer import Peer
from dni_runtime.bench.spread import Spread, ratios
from dni_runtime.errors import UsageError
from dni_runtime.keys import KeyPair, KnownKeys
from dni_runtime.spec import LinksSpec

Transport = Literal["ipc", "tcp"]

SMALL_BYTES = 1024
"""Size of the message whose latency is measured."""

_KINDS: tuple[Kind, ...] = ("link", "raw")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_LARGEST = 1 << 30


@dataclass(frozen=True)
class Throughput:
    """Batches of one size in one direction.

    Attributes:
        transport: ``ipc`` or ``tcp`` (loopback).
        security: Whether it is encrypted.
        bytes: Size of a batch's activation.
        link: Megabytes (1e6) per second through the link.
        raw: The same through bare ZeroMQ.
        ratio: Link over bare ZeroMQ, within a repetition.
        of_plain: Encrypted link over plain link, within a repetition; None for a plain link.
        source_cpu_us: CPU microseconds of the link's sender per batch, including ZeroMQ's thread.
        sink_cpu_us: The same for its receiver.
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
    """Latency of small batches, one at a time, from sending to a tensor at the other end.

    Attributes:
        transport: ``ipc`` or ``tcp`` (loopback).
        security: Whether it is encrypted.
        bytes: Size of a batch's activation.
        link: Microseconds through the link, one way.
        raw: The same through bare ZeroMQ.
        ratio: Link over bare ZeroMQ, within a repetition.
        of_plain: Encrypted link over plain link, within a repetition; None for a plain link.
    """

    transport: Transport
    security: Security
    bytes: int
    link: Spread
    raw: Spread
    ratio: Spread
    of_plain: Spread | None


def parse_size(text: str) -> int:
    """Return the bytes of ``64KB``, ``1MB`` or ``4096`` (KB is 1024 bytes).

    Raises:
        UsageError: It is not a valid size of a float32 tensor.
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
            f"{text!r} is not a valid batch size",
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
        transports: Transports to measure.
        securities: Encryption settings to measure; ipc is never encrypted.
        repetitions: Number of repetitions.
        seconds: Minimum duration of each; more if few batches fit in.
        window: Unacknowledged batches, and bare ZeroMQ's high-water mark.
        observe: Called with a line after each measurement.

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
    own = KeyPair.new()
    with Peer() as receiver:
        for repetition in range(repetitions):
            for transport, security in ways:
                links = LinksSpec(transport=transport, window=window, security=security)
                for size in (0, *sizes):  # 0: the latency of small ones
                    # Alternate which comes first, so that neither always follows the other.
                    for kind in _KINDS[:: -1 if repetition % 2 else 1]:
                        nbytes = size or SMALL_BYTES
                        job = Job(kind, nbytes, links, latency=size == 0)
                        for name, value in _run(receiver, own, job, seconds).items():
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


def _run(receiver: Peer, own: KeyPair, job: Job, seconds: float) -> dict[str, float]:
    """Send a job's batches, and return what both ends measured."""
    address = receiver.listen(job, own.public)
    keys = KnownKeys(own, {"sink": receiver.key})
    make: Callable[..., Source] = LinkSource if job.kind == "link" else RawSource
    with opened(make, job, address, keys) as source:
        found = send(source, job, 0.0 if job.latency else seconds)
        return found | receiver.answer()
