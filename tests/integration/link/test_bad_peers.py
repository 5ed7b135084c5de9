"""Strangers and broken neighbours on real sockets: refused, counted, and the stream goes on."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
import zmq

from dni_runtime.link.contract import LinkContract
from dni_runtime.link.handshake import Hello
from dni_runtime.wire import (
    PROTOCOL_VERSION,
    Buffer,
    Kind,
    Limits,
    Mark,
    Message,
    TensorEntry,
    decode,
    encode,
)
from tests.integration.link.conftest import Stream

Raw = Callable[[int], "zmq.Socket[bytes]"]
JUNK = 10_000


def batch(id: int, h: TensorEntry, y: TensorEntry, *buffers: bytes) -> list[Buffer]:
    return encode(Message(Kind.BATCH, "run", "stem", id=id, tensors=(h, y), buffers=tuple(buffers)))


H, Y = TensorEntry("h", "float32", (2, 4)), TensorEntry("y", "int64", (2,))
GOOD = batch(1, H, Y, bytes(32), bytes(16))
HEADER = bytes(GOOD[0])

BROKEN: dict[str, tuple[list[Buffer], str]] = {
    "missing buffer": (GOOD[:2], "truncated"),
    "huge buffer": ([HEADER, bytes(200_000), bytes(16)], "oversized"),
    "huge header": ([bytes(70_000)], "oversized"),
    "next version": (
        [msgpack.packb([PROTOCOL_VERSION + 1, *msgpack.unpackb(HEADER)[1:]]), *GOOD[1:]],
        "version",
    ),
    "wrong shape": (
        batch(1, TensorEntry("h", "float32", (4, 2)), Y, bytes(32), bytes(16)),
        "shape",
    ),
    "a hundred frames": ([HEADER, *[b"x"] * 99], "count"),
    "another run": (encode(Message(Kind.MARK, "other", "stem", id=1, mark=Mark.END)), "run"),
    "pickle": ([b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94."], "header"),
}
"""One of each way that a message can be wrong; all of them: tests/unit/wire and unit/link."""


def junk(count: int) -> list[list[bytes]]:
    """Random multipart messages; the seed is fixed, so that a failure comes again."""
    random_ = random.Random(7)
    messages = []
    for _ in range(count):
        frames = [
            random_.randbytes(random_.randrange(1, 80)) for _ in range(random_.randrange(1, 5))
        ]
        if random_.random() < 0.3:
            broken = bytearray(HEADER)
            broken[random_.randrange(len(broken))] = random_.randrange(256)
            frames = [bytes(broken), *frames[1:]]
        messages.append(frames)
    return messages


def test_ten_thousand_messages_of_a_stranger(links: Any, address: str, raw: Raw) -> None:
    stream = Stream(*links.pair(address))
    stream.drive(5)
    stranger = raw(zmq.DEALER)
    stranger.connect(stream.address)
    for number, frames in enumerate(junk(JUNK), 1):
        stranger.send_multipart(frames)
        if number % 500 == 0:
            stream.drive(5)
    stream.until_refused(JUNK)
    assert stream.input.counters.refused.total() == JUNK
    assert not stream.output.counters.refused
    stream.drive(50)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_message_of_a_stranger(links: Any, address: str, raw: Raw, name: str) -> None:
    stream = Stream(*links.pair(address))
    stranger = raw(zmq.DEALER)
    stranger.connect(stream.address)
    stranger.send_multipart(BROKEN[name][0])
    stream.until_refused(1)
    stream.drive(10)
    assert stream.input.counters.refused.total() == 1


def test_a_stranger_learns_nothing_but_the_invitation(links: Any, address: str, raw: Raw) -> None:
    stream = Stream(*links.pair(address))
    stranger = raw(zmq.DEALER)
    stranger.setsockopt(zmq.PROBE_ROUTER, 1)
    stranger.connect(stream.address)
    stranger.send_multipart(GOOD)
    stream.until_refused(1)
    for _ in range(3):
        stranger.send_multipart(GOOD)
    stream.until_refused(4)
    for _ in range(2):  # for its connection, and for its first batch
        reply = decode(stranger.recv_multipart(), Limits(0, 0))
        assert (reply.kind, reply.body["field"]) == (Kind.REFUSE, "hello")
    assert not stranger.poll(100)
    stream.drive(5)


def test_a_frame_beyond_the_limit_ends_the_strangers_connection(
    links: Any, address: str, raw: Raw
) -> None:
    stream = Stream(*links.pair(address))
    stranger = raw(zmq.DEALER)
    stranger.connect(stream.address)
    stranger.send_multipart([HEADER, bytes(8 << 20), bytes(16)])
    stream.drive(50)
    if address.startswith("tcp"):  # nobody watches the sockets that only their owner can reach
        stream.until_refused(1)
    assert set(stream.input.counters.refused) <= {"connection"}


def test_a_stranger_that_does_not_speak_zeromq(links: Any) -> None:
    stream = Stream(*links.pair("tcp://127.0.0.1:*"))
    port = int(stream.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        stream.drive(50)


def test_a_flood_does_not_starve_the_stream(links: Any, address: str, raw: Raw) -> None:
    """One call handles a bounded number of frames, and ZeroMQ takes from each peer in turn."""
    stream = Stream(*links.pair(address))
    strangers = [raw(zmq.DEALER) for _ in range(4)]
    for stranger in strangers:
        stranger.connect(stream.address)
        for _ in range(2000):
            stranger.send(b"flood")
    stream.drive(20)
    stream.until_refused(8000)


class BrokenPeer:
    """A peer that completes HELLO and then sends what it likes."""

    def __init__(self, links: Any, spec: Any, raw: Raw, address: str) -> None:
        self._links = links
        self.input = links.input()
        self._socket = raw(zmq.DEALER)
        self._socket.connect(self.input.bind(address))
        hello = Hello("peer", 1, LinkContract.of(spec, spec.targets[0]).agreement)
        self.send(encode(Message(Kind.HELLO, "run", "stem", body=hello.body())))
        links.until(self.input.greet, "HELLO")
        assert decode(self._socket.recv_multipart(), Limits(0, 0)).kind is Kind.WELCOME

    def send(self, frames: list[Any]) -> None:
        self._socket.send_multipart(frames)

    def expect(self, id: int) -> None:
        """The stream goes on."""
        self.send(batch(id, H, Y, bytes(32), bytes(16)))
        (got,) = self._links.collect(self.input, 1)
        assert got.id == id
        self.input.ack(id)


@pytest.fixture
def peer(links: Any, make_spec: Any, raw: Raw, address: str) -> BrokenPeer:
    return BrokenPeer(links, make_spec("stem"), raw, address)


def test_ten_thousand_messages_of_an_accepted_peer(peer: BrokenPeer) -> None:
    for number, frames in enumerate(junk(JUNK), 1):
        peer.send(frames)
        if number % 500 == 0:
            peer.expect(number // 500)
    assert peer.input.counters.refused.total() == JUNK
    assert peer.input.counters.gaps == 0


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_message_of_an_accepted_peer(peer: BrokenPeer, name: str) -> None:
    frames, reason = BROKEN[name]
    peer.expect(1)
    peer.send(frames)
    peer.expect(2)
    assert peer.input.counters.refused == {reason: 1}


def test_a_broken_downstream(links: Any, make_spec: Any, raw: Raw, address: str) -> None:
    """The output end, too, refuses and counts whatever is not a message of its link."""
    neighbour = raw(zmq.ROUTER)
    neighbour.bind(address)
    output = links.output()
    actual = neighbour.getsockopt_string(zmq.LAST_ENDPOINT)
    identities: list[bytes] = []

    def answer() -> bool:
        """Play an input end; never stops the waiting."""
        while neighbour.poll(0):
            identity, *frames = neighbour.recv_multipart()
            welcome = Message(Kind.WELCOME, "run", "tail", body={"number": 1, "received": 0})
            refuse = Message(
                Kind.REFUSE, "run", "tail", body={"field": "hello", "mine": "", "yours": ""}
            )
            identities.append(identity)
            reply = refuse if frames == [b""] else welcome
            neighbour.send_multipart([identity, *encode(reply)])
        return False

    output.connect(actual, deadline_s=links.DEADLINE_S, stop=answer)
    output.send_batch(*links.batch(1))
    output.send_batch(*links.batch(2))
    for frames in junk(1000):
        neighbour.send_multipart([identities[-1], *frames])
    g = Message(
        Kind.GRADIENT,
        "run",
        "tail",
        id=1,
        ack=1,
        tensors=(TensorEntry("g", "float32", (2, 4)),),
        buffers=(bytes(32),),
    )
    header, buffer = encode(g)
    for frames in ([header], [header, bytes(31)], [header, bytes(300_000)], [header, *[b"x"] * 9]):
        neighbour.send_multipart([identities[-1], *frames])
    neighbour.send_multipart([identities[-1], header, buffer])
    events: list[Any] = []
    links.until(lambda: bool(events.extend(output.receive()) or events), "the gradient")
    assert torch.equal(events[0].g, torch.zeros(2, 4))
    assert output.counters.refused.total() == 1004
    assert output.in_flight == 1


def test_an_oversized_frame_of_an_accepted_peer_costs_a_reconnection(
    links: Any, address: str
) -> None:
    """libzmq ends the connection; the link comes up again and nothing is lost."""
    stream = Stream(*links.pair(address))
    stream.drive(3)
    stream.output._socket.send_multipart([HEADER, bytes(8 << 20), bytes(16)])
    stream.drive(50)
    assert stream.output.counters.handshakes == 2
