"""Encrypted links on real sockets: who gets in, and what is said to whom that does not."""

from __future__ import annotations

from typing import Any

import pytest

from dni_runtime.errors import DataError, EncryptionError, UnavailableError
from dni_runtime.run.keys import KeyPair, KnownKeys
from dni_runtime.spec import LinksSpec
from tests.integration.link.conftest import two_rings
from tests.integration.link.relay import Relay

CURVE = LinksSpec(transport="tcp", security="curve", window=4)
PLAIN = LinksSpec(transport="tcp", window=4)
ADDRESS = "tcp://127.0.0.1:*"


def drive(links: Any, output: Any, input: Any, ids: range) -> None:
    """Send batches and take them, with their gradients."""
    for id in ids:
        output.send_batch(*links.batch(id))
        (got,) = links.collect(input, 1)
        assert (got.id, got.xs[0][0, 0]) == (id, id)
        input.send_gradient(id, got.xs[0], id)
        links.until(lambda: bool(output.receive()), f"gradient {id}")


def refused_at(input: Any) -> dict[str, int]:
    input.greet()
    return dict(input.counters.refused)


def test_neighbours_that_know_each_other(links: Any) -> None:
    output, input, _ = links.pair(ADDRESS, keys=two_rings(), links=CURVE)
    drive(links, output, input, range(1, 20))
    assert not input.counters.refused
    assert not output.counters.refused


def test_nothing_can_be_read_on_the_way(links: Any, make_spec: Any) -> None:
    """What one sees who forwards the bytes: neither the run's name nor an activation."""
    name = "a-run-with-a-secret-name"
    keys = two_rings()
    for security, visible in (("curve", False), ("none", True)):
        settings = LinksSpec(transport="tcp", security=security, window=4)
        input = links.input(run=name, keys=keys[1], links=settings)
        output = links.output(run=name, keys=keys[0], links=settings)
        with Relay(input.bind(ADDRESS)) as relay:
            links.shake(output, input, relay.address)
            drive(links, output, input, range(1, 5))
            assert (name.encode() in relay.down) == visible


def test_a_key_that_is_not_on_the_list(links: Any) -> None:
    """Knowing the server's public key is not enough."""
    stem, tail = two_rings()
    thief = KnownKeys(KeyPair.new(), stem.publics)
    input = links.input(keys=tail, links=CURVE)
    output = links.output(keys=thief, links=CURVE)
    address = input.bind(ADDRESS)
    with pytest.raises(EncryptionError, match="it refused our key"):
        output.connect(address, deadline_s=1, stop=lambda: input.greet())
    links.until(lambda: refused_at(input).get("unauthorised", 0) > 0, "a count")
    assert not input.connected


def test_another_server_key(links: Any) -> None:
    stem, tail = two_rings()
    misled = KnownKeys(stem.pair, {"tail": KeyPair.new().public})
    input = links.input(keys=tail, links=CURVE)
    address = input.bind(ADDRESS)
    with pytest.raises(EncryptionError, match="does not match its public key"):
        links.output(keys=misled, links=CURVE).connect(address, deadline_s=1)
    links.until(lambda: refused_at(input).get("encryption", 0) > 0, "a count")
    assert not input.connected


@pytest.mark.parametrize("encrypted_end", ["input", "output"])
def test_only_one_end_encrypts(links: Any, encrypted_end: str) -> None:
    stem, tail = two_rings()
    input = links.input(keys=tail, links=CURVE if encrypted_end == "input" else PLAIN)
    output = links.output(keys=stem, links=CURVE if encrypted_end == "output" else PLAIN)
    address = input.bind(ADDRESS)
    expected = "requires encryption" if encrypted_end == "input" else "does not use encryption"
    with pytest.raises(EncryptionError, match=expected) as caught:
        output.connect(address, deadline_s=2)
    assert "links.security" in str(caught.value.hint)
    links.until(lambda: sum(refused_at(input).values()) > 0, "a count")
    assert not input.connected


def test_a_module_without_keys(links: Any) -> None:
    with pytest.raises(UnavailableError, match="module 'tail' has no keys"):
        links.input(links=CURVE).bind(ADDRESS)
    with pytest.raises(EncryptionError, match="its public key is missing"):
        links.output(links=CURVE).connect("tcp://127.0.0.1:5000", deadline_s=0.5)


def test_a_neighbours_key_that_appears_late(links: Any) -> None:
    """As on a shared file system: refused first, then tried again, though libzmq would not."""
    stem, tail = two_rings()
    known: dict[str, bytes] = {}
    input = links.input(keys=KnownKeys(tail.pair, known), links=CURVE)
    output = links.output(keys=stem, links=CURVE)
    address = input.bind(ADDRESS)
    with pytest.raises(EncryptionError):
        output.connect(address, deadline_s=0.5)
    known.update(tail.publics)
    links.shake(output, input, address)
    drive(links, output, input, range(1, 5))


def test_a_server_key_that_appears_late(links: Any) -> None:
    stem, tail = two_rings()
    known: dict[str, bytes] = {}
    input = links.input(keys=tail, links=CURVE)
    output = links.output(keys=KnownKeys(stem.pair, known), links=CURVE)
    address = input.bind(ADDRESS)
    with pytest.raises(EncryptionError, match="its public key is missing"):
        output.connect(address, deadline_s=0.5)
    known.update(stem.publics)
    links.shake(output, input, address)
    drive(links, output, input, range(1, 5))


def test_a_restarted_neighbour_has_the_same_key(links: Any) -> None:
    keys = two_rings()
    output, input, address = links.pair(ADDRESS, keys=keys, links=CURVE)
    drive(links, output, input, range(1, 5))
    input.close()
    again = links.input(keys=keys[1], links=CURVE, received=4)
    again.bind(address)
    output.send_batch(*links.batch(5))
    assert links.collect(again, 1, output=output)[0].id == 5


def test_a_link_that_moves_to_another_address_and_key(links: Any) -> None:
    stem, tail = two_rings()
    output, input, _ = links.pair(ADDRESS, keys=(stem, tail), links=CURVE)
    drive(links, output, input, range(1, 3))
    input.close()
    other = KeyPair.new()
    elsewhere = links.input(
        keys=KnownKeys(other, {"stem": stem.pair.public}), links=CURVE, received=2
    )
    address = elsewhere.bind(ADDRESS)
    output.connect(
        address,
        deadline_s=links.DEADLINE_S,
        server_key=other.public,
        stop=lambda: elsewhere.greet() and False,
    )
    drive(links, output, elsewhere, range(3, 6))


def test_the_computing_thread_is_not_needed_for_a_handshake(links: Any, raw: Any) -> None:
    """Who connects while a module computes for seconds gets through ZeroMQ's handshake."""
    import zmq

    stem, tail = two_rings()
    input = links.input(keys=tail, links=CURVE)
    peer = raw(zmq.DEALER)
    peer.curve_publickey, peer.curve_secretkey = stem.pair.public, stem.pair.secret
    peer.curve_serverkey = tail.pair.public
    peer.connect(input.bind(ADDRESS))
    monitor = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert monitor.poll(5000)  # nobody has called input.receive()
    monitor.close()
    peer.disable_monitor()


def test_no_second_address_turns_encryption_off(links: Any) -> None:
    input = links.input(keys=two_rings()[1], links=CURVE)
    input.bind(ADDRESS)
    with pytest.raises(ValueError, match="listens at one address"):
        input.bind("ipc:///tmp/plain.sock")


def test_no_thread_is_left(links: Any) -> None:
    import threading

    before = threading.active_count()
    output, input, _ = links.pair(ADDRESS, keys=two_rings(), links=CURVE)
    assert threading.active_count() > before
    output.close()
    input.close()
    links.until(lambda: threading.active_count() <= before, "its threads have ended")


@pytest.mark.parametrize("key", [b"short", b"x" * 41, b"~" * 40])
def test_a_damaged_public_key_of_a_neighbour(links: Any, key: bytes) -> None:
    """As in an endpoint record that somebody has edited."""
    stem, _ = two_rings()
    with pytest.raises(DataError, match="is damaged"):
        links.output(keys=stem, links=CURVE).connect(
            "tcp://127.0.0.1:5000", deadline_s=1, server_key=key
        )
