"""Strangers at an encrypted link: refused and counted, with bounded memory, while batches flow."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from dni_runtime.link.contract import LinkContract
from dni_runtime.link.guard import CONNECTIONS
from dni_runtime.link.handshake import Hello
from dni_runtime.run.keys import KeyPair
from dni_runtime.spec import LinksSpec
from dni_runtime.wire import Kind, Message, encode
from tests.integration.link.conftest import Stream, two_rings
from tests.integration.link.relay import Relay

CURVE = LinksSpec(transport="tcp", security="curve", window=4)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1 (RFC 37): signature, version, mechanism, as-server, filler."""

GIGABYTE = 1 << 30
LITTLE = 64 << 20  # bytes of memory that may come and go for other reasons


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Chain(Stream):
    """An encrypted link over which batches flow, whoever else connects."""

    def __init__(self, links: Any, stack: ExitStack) -> None:
        self.stem, self.tail = two_rings()
        input = links.input(keys=self.tail, links=CURVE)
        output = links.output(keys=self.stem, links=CURVE)
        super().__init__(output, input, input.bind("tcp://127.0.0.1:*"))
        self.relay = stack.enter_context(Relay(self.address))
        links.shake(output, input, self.relay.address)

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)


@pytest.fixture
def chain(links: Any) -> Iterator[Chain]:
    with ExitStack() as stack:
        chain = Chain(links, stack)
        chain.drive(20)
        yield chain


@pytest.fixture
def dial(chain: Chain) -> Iterator[Any]:
    """Connects plain sockets to the chain's link."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(chain.place))


def say_hello(stranger: Any, make_spec: Any) -> None:
    """Say what the module upstream would say, if the connection is still there."""
    body = Hello(
        "stranger", 1, LinkContract.of(one := make_spec("stem"), one.targets[0]).agreement
    ).body()
    with contextlib.suppress(zmq.Again):
        message = Message(Kind.HELLO, "run", "stem", body=body)
        stranger.send_multipart(encode(message), zmq.NOBLOCK)


def test_a_client_without_encryption(chain: Chain, raw: Any, make_spec: Any) -> None:
    stranger = raw(zmq.DEALER)
    stranger.connect(chain.address)
    say_hello(stranger, make_spec)
    chain.until_refused(1, "connection", "encryption")  # one of both ends is the first to notice
    assert chain.input.counters.handshakes == 1


def test_a_client_without_encryption_that_does_not_give_up(chain: Chain, dial: Any) -> None:
    plain = GREETING.replace(b"CURVE", b"NULL\0")
    dial().sendall(plain + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x06DEALER")
    chain.until_refused(1, "encryption")


def test_a_stolen_server_key(chain: Chain, raw: Any, make_spec: Any) -> None:
    stranger = raw(zmq.DEALER)
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = chain.tail.pair.public
    stranger.connect(chain.address)
    say_hello(stranger, make_spec)
    chain.until_refused(1, "unauthorised")
    assert chain.input.counters.handshakes == 1


def test_the_upstreams_public_key_without_its_secret(chain: Chain, raw: Any) -> None:
    stranger = raw(zmq.DEALER)
    stranger.curve_publickey, stranger.curve_secretkey = (
        chain.stem.pair.public,
        KeyPair.new().secret,
    )
    stranger.curve_serverkey = chain.tail.pair.public
    stranger.connect(chain.address)
    chain.until_refused(1, "encryption")
    assert chain.input.counters.handshakes == 1


@pytest.mark.parametrize("share", [1.0, 0.9, 0.1])
def test_replayed_frames(chain: Chain, dial: Any, share: float) -> None:
    """What a real upstream has sent, sent again: its keys were good for that session only."""
    chain.drive(50)
    recorded = bytes(chain.relay.down)
    assert len(recorded) > 50 * 100
    stranger = dial()
    with contextlib.suppress(OSError):  # the other end may have hung up already
        stranger.sendall(recorded[: int(share * len(recorded))])
        stranger.shutdown(socket.SHUT_WR)
    chain.until_refused(1)
    chain.drive(50)
    assert chain.input.counters.handshakes == 1
    assert chain.input.counters.duplicates == 0


@pytest.mark.parametrize("flags", [0x02, 0x03, 0x06], ids=["message", "more", "command"])
def test_an_announced_gigabyte(chain: Chain, dial: Any, flags: int) -> None:
    before = memory_bytes()
    for number in range(1, 21):
        stranger = dial()
        stranger.sendall(GREETING + bytes([flags]) + struct.pack(">Q", GIGABYTE) + bytes(1000))
        chain.until_refused(number, "connection")
    assert memory_bytes() - before < LITTLE


def test_a_thousand_connections_that_never_speak(links: Any, chain: Chain, dial: Any) -> None:
    memory, files = memory_bytes(), descriptors()
    most = 0
    for number in range(1000):
        dial()
        if number % 20 == 0:
            chain.step()
        # half of the descriptors are the strangers' own ends
        most = max(most, descriptors() - files - (number + 1))
    chain.until_refused(1000 - CONNECTIONS, "crowd")
    assert most < CONNECTIONS + 200
    assert descriptors() - files - 1000 <= CONNECTIONS
    assert memory_bytes() - memory < LITTLE
    assert chain.output.counters.handshakes == 1  # the neighbour's own connection stayed


def test_a_neighbour_gets_in_among_a_thousand_that_never_speak(
    links: Any, chain: Chain, dial: Any
) -> None:
    for _ in range(500):
        dial()
    again = links.output(keys=chain.stem, links=CURVE, next_id=chain.got + 1)
    began_s = time.monotonic()

    def others() -> bool:
        dial()
        chain.input.receive()
        return False

    again.connect(chain.address, deadline_s=links.DEADLINE_S, stop=others)
    assert time.monotonic() - began_s < 5
