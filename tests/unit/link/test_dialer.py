"""The connection of an output end, against a scripted libzmq and a clock."""

from __future__ import annotations

import errno
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from dni_runtime.link import dialer, sockets
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.dialer import Dialer
from dni_runtime.run.keys import KeyPair, KnownKeys
from dni_runtime.spec import LinksSpec
from tests.conftest import MakeSpec

HERE, THERE = "tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"
OWN, KEY, OTHER_KEY = KeyPair(b"public", b"secret"), b"k" * 40, b"o" * 40
CURVE, PLAIN = LinksSpec(security="curve"), LinksSpec(security="none")

AUTH = (int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), 400)
MECHANISM = (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), 0x11000002)
OTHER_PROTOCOL = (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), 0x11000001)
SILENCE = (int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), errno.EAGAIN)
RESET = (int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), errno.ECONNRESET)
DONE = (int(zmq.EVENT_HANDSHAKE_SUCCEEDED), 0)


class Zmq:
    """What a dialer does to its socket, the events that it will see, and a clock."""

    def __init__(self, patch: pytest.MonkeyPatch, make_spec: MakeSpec) -> None:
        self.now_s = 100.0
        self.calls: list[tuple[str, Any]] = []
        self.events: deque[tuple[int, int]] = deque()
        self.publics: dict[str, bytes] = {}
        self._contract = LinkContract.of(one := make_spec("stem"), one.targets[0])
        patch.setattr(dialer, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        patch.setattr(sockets, "monitor", lambda *args: None)
        patch.setattr(
            sockets, "next_event", lambda _: self.events.popleft() if self.events else None
        )
        for name in ("connect", "disconnect"):
            patch.setattr(sockets, name, lambda _, to, name=name: self.calls.append((name, to)))
        patch.setattr(sockets, "leave_plain", lambda _: self.calls.append(("plain", None)))
        patch.setattr(
            sockets,
            "encrypt_output",
            lambda _, own, key: self.calls.append(("encrypt", (own, key))),
        )

    def dialer(self, links: LinksSpec = CURVE, *, keys: bool = True) -> Dialer:
        socket: Any = None
        ring = KnownKeys(OWN, self.publics) if keys else None
        return Dialer(socket, socket, self._contract, links, ring)

    def take(self) -> list[tuple[str, Any]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, make_spec: MakeSpec) -> Zmq:
    return Zmq(monkeypatch, make_spec)


def test_a_plain_link(world: Zmq) -> None:
    made = world.dialer(PLAIN)
    assert made.dial(HERE)
    assert world.take() == [("plain", None), ("connect", HERE)]
    assert made.address == HERE


def test_a_given_key_counts_more_than_the_keyring(world: Zmq) -> None:
    world.publics["tail"] = OTHER_KEY
    made = world.dialer()
    assert made.dial(HERE, KEY)
    assert world.take() == [("encrypt", (OWN, KEY)), ("connect", HERE)]
    assert world.dialer().dial(HERE)
    assert world.take() == [("encrypt", (OWN, OTHER_KEY)), ("connect", HERE)]


def test_the_same_address_and_key_change_nothing(world: Zmq) -> None:
    made = world.dialer()
    made.dial(HERE, KEY)
    world.take()
    assert not made.dial(HERE, KEY)
    assert world.take() == []


@pytest.mark.parametrize(("address", "key"), [(THERE, KEY), (HERE, OTHER_KEY)])
def test_another_address_or_key_replaces_the_connection(
    world: Zmq, address: str, key: bytes
) -> None:
    """A former failure does not count any more."""
    made = world.dialer()
    made.dial(HERE, KEY)
    world.events.append(AUTH)
    made.look(connected=False)
    world.take()
    assert made.dial(address, key)
    assert world.take() == [("disconnect", HERE), ("encrypt", (OWN, key)), ("connect", address)]
    assert made.failure is None
    world.now_s += 10
    made.look(connected=False)
    assert world.take() == []


def test_a_key_that_appears_late(world: Zmq) -> None:
    """Nothing is connected without it; it is looked for once a second."""
    made = world.dialer()
    made.dial(HERE)
    assert world.take() == []
    assert made.failure is not None
    assert made.failure.message == "its public key is missing"
    for _ in range(30):
        world.now_s += 0.1
        made.look(connected=False)
    assert world.take() == [("disconnect", HERE)] * 2
    world.publics["tail"] = KEY
    world.now_s += 1.1
    made.look(connected=False)
    assert world.take() == [("disconnect", HERE), ("encrypt", (OWN, KEY)), ("connect", HERE)]


def test_a_module_without_keys_connects_to_no_encrypted_link(world: Zmq) -> None:
    made = world.dialer(keys=False)
    made.dial(HERE, KEY)
    assert world.take() == []
    assert made.failure is not None


@pytest.mark.parametrize(
    ("links", "event", "reason", "message", "final"),
    [
        (CURVE, AUTH, "unauthorised", "it refused our key", True),
        (CURVE, MECHANISM, "encryption", "it does not use encryption", True),
        (PLAIN, MECHANISM, "encryption", "it requires encryption", True),
        (CURVE, OTHER_PROTOCOL, "encryption", "its answer does not match its public key", True),
        (CURVE, SILENCE, "silent", "it does not answer", False),
        (CURVE, RESET, "connection", "it ended the handshake: its key does not match", False),
        (PLAIN, RESET, "connection", "it ended the handshake: it probably requires", False),
    ],
)
def test_why_a_handshake_failed(
    world: Zmq, links: LinksSpec, event: tuple[int, int], reason: str, message: str, final: bool
) -> None:
    made = world.dialer(links)
    made.dial(HERE, KEY)
    world.events.append(event)
    failure = made.look(connected=False)
    assert failure is not None
    assert failure == made.failure
    assert (failure.reason, failure.final) == (reason, final)
    assert failure.message.startswith(message)
    error = made.error(failure)
    for word in ("'stem'", "'tail'", HERE, failure.message):
        assert word in error.message


def test_a_plain_connection_that_gets_no_answer_is_no_failure(world: Zmq) -> None:
    made = world.dialer(PLAIN)
    made.dial(HERE)
    world.events.append(SILENCE)
    assert made.look(connected=False) is None
    assert made.failure is None


def test_a_final_failure_is_not_forgotten_for_another_one(world: Zmq) -> None:
    made = world.dialer()
    made.dial(HERE, KEY)
    world.events += [SILENCE, AUTH, SILENCE]
    newest = made.look(connected=False)
    assert newest is not None
    assert newest.reason == "silent"
    assert made.failure is not None
    assert made.failure.reason == "unauthorised"


def test_a_handshake_that_succeeds_takes_failures_back(world: Zmq) -> None:
    made = world.dialer()
    made.dial(HERE, KEY)
    world.events += [SILENCE, DONE]
    assert made.look(connected=False) is None
    assert made.failure is None


@pytest.mark.parametrize(("event", "again"), [(AUTH, True), (SILENCE, False), (RESET, False)])
def test_libzmq_gives_up_after_a_final_failure_only(
    world: Zmq, event: tuple[int, int], again: bool
) -> None:
    """A second later the dialer connects for it, once for each failure."""
    made = world.dialer()
    made.dial(HERE, KEY)
    world.take()
    world.events += [event, event]
    for _ in range(50):
        made.look(connected=False)
        assert world.now_s >= 100.9 or not world.calls
        world.now_s += 0.1
    once = [("disconnect", HERE), ("encrypt", (OWN, KEY)), ("connect", HERE)]
    assert world.take() == (once if again else [])


def test_failures_that_go_on_do_not_postpone_the_next_attempt(world: Zmq) -> None:
    made = world.dialer()
    made.dial(HERE, KEY)
    world.take()
    for _ in range(50):
        world.events.append(AUTH)
        made.look(connected=False)
        world.now_s += 0.1
    assert 4 <= world.take().count(("connect", HERE)) <= 5


def test_a_link_in_use_is_looked_at_once_a_second(world: Zmq) -> None:
    made = world.dialer()
    made.dial(HERE, KEY)
    seen = 0
    for _ in range(30):
        world.events.append(SILENCE)
        seen += made.look(connected=True) is not None
        world.now_s += 0.1
    assert 3 <= seen <= 4


def test_nothing_is_looked_at_before_the_first_address(world: Zmq) -> None:
    made = world.dialer()
    world.events.append(AUTH)
    assert made.look(connected=False) is None
    made.dial_again()
    assert world.take() == []
