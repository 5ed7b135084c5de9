"""Links between the nodes of an allocation: round trips and throughput.

One small step on each node (``peer``) receives and sends in turn, over the same sockets as the
links of modules: interface, encryption and window are those of a chain.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from dni_runtime.errors import DniError
from dni_runtime.link import encrypted
from dni_runtime.measure.ends import Job
from dni_runtime.measure.peer import PROGRAM, Peer
from dni_runtime.plan.placement import link_kinds
from dni_runtime.schedulers.slurm.allocation import Allocation, beside
from dni_runtime.schedulers.slurm.steps import step_environment
from dni_runtime.spec import ChainSpec, EdgeSpec, LinksSpec, WorkerSpec
from dni_runtime.spec.edge import LaneSpec
from dni_runtime.spec.profile import ProfileSpec

SIZES_BYTES = (1 << 20, 16 << 20)
"""Sizes of the messages whose throughput is measured."""

_SMALL_BYTES = 1024  # of a message whose round trip is measured
_JOIN_S = 10.0
_SECONDS = 0.5


@dataclass(frozen=True)
class HostPair:
    source: str  # of the module upstream
    sink: str  # of the module downstream, which listens
    links: LinksSpec

    @property
    def ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Host and process number of the sender and of the receiver."""
        return (self.source, 0), (self.sink, int(self.sink == self.source))


@dataclass(frozen=True)
class LineResult:
    """Result of measuring a line; MB are 1e6 bytes."""

    source: str
    sink: str
    transport: str  # ipc or tcp
    interface: str | None  # the requested one, or the network
    address: str | None = None  # where the sink listened; None if it did not
    encrypted: bool = False  # by CURVE
    round_trip_us: float | None = None  # median, from sending 1 KB to its acknowledgement
    round_trip_p99_us: float | None = None
    mb_per_s: dict[int, float] = field(default_factory=dict)  # one way, by message bytes
    error: str | None = None  # why it failed or is incomplete


def lines_of_chain(
    chain: ChainSpec,
    workers: Sequence[WorkerSpec],  # head first
    profile: ProfileSpec,
    nodes: Sequence[int],  # of each worker
    hosts: Sequence[str],  # names of the nodes
) -> list[HostPair]:
    """Return the lines that a chain's links would use, each once."""
    kinds = link_kinds(chain, workers, profile.interface, nodes)
    at = {worker.module: nodes[number] for number, worker in enumerate(workers)}
    lines: list[HostPair] = []
    edges: list[EdgeSpec | LaneSpec] = [edge for worker in workers for edge in worker.links_in]
    for edge in edges + [lane for worker in workers for lane in worker.peers]:
        transport, interface = kinds[edge.target]
        update = {"transport": transport, "interface": interface}
        if transport == "ipc":
            update["port"] = None
        links = _measurable(chain.links).model_copy(update=update)
        line = HostPair(hosts[at[edge.source]], hosts[at[edge.target]], links)
        if line not in lines:
            lines.append(line)
    return lines


def lines_between(hosts: Sequence[str], interface: str) -> list[HostPair]:
    """Return the lines between all pairs of hosts, over encrypted tcp."""
    links = _measurable(LinksSpec(transport="tcp", interface=interface))
    return [HostPair(source, sink, links) for source, sink in combinations(hosts, 2)]


def lines_within(host: str, links: LinksSpec) -> list[HostPair]:
    """Return the lines of one host to itself: ipc, and loopback encrypted as between hosts."""
    plain = {"interface": None, "port": None}
    curve = "none" if links.security == "none" else "curve"
    links = _measurable(links)
    return [
        HostPair(host, host, links.model_copy(update={**plain, "transport": "ipc"})),
        HostPair(
            host, host, links.model_copy(update={**plain, "transport": "tcp", "security": curve})
        ),
    ]


def _measurable(links: LinksSpec) -> LinksSpec:
    """Return the settings without conversion on the wire, and with a shorter timeout."""
    narrow = {"dtype": None, "gradient_dtype": None}
    return links.model_copy(update={**narrow, "connect_timeout_s": _JOIN_S})


def step_on(allocation: Allocation, host: str, python: str | None = None) -> Peer:
    """Return a measuring process that runs as a step of an allocation, on one of its nodes.

    ``python`` is the Python with dnictl on the nodes (default: this one).
    """
    program = (python or sys.executable, *PROGRAM[1:])
    return Peer([*beside([host]), *program], environ=step_environment(os.environ))


def measure_lines(lines: Sequence[HostPair], start: Callable[[str], Peer]) -> Iterator[LineResult]:
    """Measure one line after the other, so that none disturbs another."""
    with contextlib.ExitStack() as stack:
        ends = dict.fromkeys(end for line in lines for end in line.ends)
        peers = {end: stack.enter_context(start(end[0])) for end in ends}
        for line in lines:
            source, sink = (peers[end] for end in line.ends)
            yield _measure(line, source, sink)


def _measure(line: HostPair, source: Peer, sink: Peer) -> LineResult:
    answers: dict[str, float] = {}
    rates: dict[int, float] = {}
    address = error = None
    try:
        for size in (0, *SIZES_BYTES):  # 0: the latency of small ones
            job = Job(size or _SMALL_BYTES, line.links, latency=size == 0)
            address = sink.listen(job, source.key)
            source.send(job, sink.key, address, _SECONDS)
            answers |= _answers(source, sink)
            if size:
                rates[size] = answers["mb_per_s"]
    except DniError as caught:
        error = caught.message
    return LineResult(
        line.source,
        line.sink,
        line.links.transport,
        line.links.interface,
        address,
        address is not None and encrypted(line.links, address),
        answers.get("round_trip_us"),
        answers.get("round_trip_p99_us"),
        rates,
        error,
    )


def _answers(source: Peer, sink: Peer) -> dict[str, float]:
    """Return what both ends measured, and leave both ready for the next job."""
    try:
        answer = source.answer()
    except DniError:
        with contextlib.suppress(DniError):
            sink.answer()
        raise
    return answer | sink.answer()
