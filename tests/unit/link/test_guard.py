"""Who may connect, and how many: against a scripted monitor, without a thread."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from dni_runtime.errors import DataError
from dni_runtime.link import guard, sockets
from dni_runtime.link.guard import REASONS, AllowList, Guard

PORT = 5000
KEY, OTHER = b"k" * 32, b"o" * 32
ACCEPTED, GONE = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
NO_DETAIL = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
SILENT, BROKEN = (NO_DETAIL, errno.EAGAIN), (NO_DETAIL, errno.EPIPE)
PROTOCOL = (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), 0x11000002)
AUTH = (int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), 400)


class Keys:
    """A key file, and a clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.key: bytes | None = None
        self.damaged = False
        self.reads = 0
        self.now_s = 100.0
        patch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.allowed = AllowList(self.read)

    def read(self) -> bytes | None:
        self.reads += 1
        if self.damaged:
            raise DataError("the key file is damaged")
        return None if self.key is None else z85.encode(self.key)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    return Keys(monkeypatch)


def test_exactly_one_key_may_connect(keys: Keys) -> None:
    keys.key = KEY
    assert keys.allowed(KEY)
    keys.now_s += 10
    assert not keys.allowed(OTHER)
    assert not keys.allowed(b"")
    assert keys.allowed(KEY)


def test_a_known_key_is_not_read_again(keys: Keys) -> None:
    keys.key = KEY
    assert all(keys.allowed(KEY) for _ in range(100))
    assert keys.reads == 1


def test_strangers_do_not_cause_a_read_each(keys: Keys) -> None:
    """At most one a second, however many there are."""
    for _ in range(300):
        assert not keys.allowed(OTHER)
        keys.now_s += 0.01
    assert 3 <= keys.reads <= 4


def test_a_key_that_appears_late_or_changes(keys: Keys) -> None:
    assert not keys.allowed(KEY)
    keys.key = KEY
    assert not keys.allowed(KEY)  # it was looked for just now
    keys.now_s += 1
    assert keys.allowed(KEY)
    keys.key = OTHER
    keys.now_s += 1
    assert keys.allowed(OTHER)
    keys.now_s += 1
    assert not keys.allowed(KEY)


def test_a_key_that_cannot_be_read_lets_nobody_in(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    keys.damaged = True
    assert not keys.allowed(KEY)
    assert "the key file is damaged" in caplog.text
    keys.damaged, keys.key = False, KEY
    keys.now_s += 1
    assert keys.allowed(KEY)


class Zap:
    """The socket of the requests: one waits, and the answer is kept."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames
        self.answer: list[bytes] = []

    def recv_multipart(self) -> list[bytes]:
        return self._frames

    def send_multipart(self, frames: list[bytes]) -> None:
        self.answer = frames


def request(mechanism: bytes = b"CURVE", *credentials: bytes) -> list[bytes]:
    return [b"1.0", b"17", b"dni", b"10.0.0.1", b"", mechanism, *credentials]


@pytest.mark.parametrize(
    ("frames", "status"),
    [
        (request(b"CURVE", KEY), b"200"),
        (request(b"CURVE", OTHER), b"400"),
        (request(b"CURVE", KEY[:31]), b"400"),
        (request(b"CURVE", KEY, KEY), b"400"),
        (request(b"CURVE"), b"400"),
        (request(b"PLAIN", KEY), b"400"),
        (request(b"NULL"), b"400"),
        (request(b"CURVE", KEY)[:4], b"400"),
    ],
)
def test_who_gets_in(make: Make, frames: list[bytes], status: bytes) -> None:
    made = make.guard(lambda key: key[:31] == KEY[:31])
    zap = Zap(frames)
    made._zap = zap  # type: ignore[assignment]
    made._answer()
    made._zap = None
    assert zap.answer[:3] == [b"1.0", b"17", status]
    assert len(zap.answer) == 6


class Connection:
    """A descriptor of this process, which libzmq may have closed, or something else may have."""

    def __init__(self, world: Make, fileno: int) -> None:
        self._world = world
        self._fileno = fileno
        if fileno in world.closed:
            raise OSError(errno.EBADF, "closed")

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._world.ports.get(self._fileno, PORT)

    def shutdown(self, how: int) -> None:
        self._world.shut.append(self._fileno)

    def detach(self) -> None:
        self._world.detached.append(self._fileno)


class Make:
    """Makes guards; the events of their monitor, and what they do to connections."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: deque[tuple[int, int]] = deque()
        self.shut: list[int] = []
        self.detached: list[int] = []
        self.closed: set[int] = set()
        self.ports: dict[int, int] = {}
        self.made: list[Guard] = []
        self.patch = patch
        monitor = SimpleNamespace(close=lambda: None)
        patch.setattr(sockets, "monitor", lambda *args: monitor)
        patch.setattr(
            sockets, "next_event", lambda _: self.events.popleft() if self.events else None
        )
        posix = SimpleNamespace(socket=lambda fileno: Connection(self, fileno), SHUT_RDWR=2)
        patch.setattr(guard, "posix", posix)

    def guard(self, allowed: Callable[[bytes], bool] | None = None, connections: int = 3) -> Guard:
        socket: Any = SimpleNamespace(disable_monitor=lambda: None)
        zap = SimpleNamespace(setsockopt=lambda *a: None, bind=lambda a: None, close=lambda: None)
        context: Any = SimpleNamespace(socket=lambda kind: zap)
        self.patch.setattr(guard, "CONNECTIONS", connections)
        made = Guard(context, socket, allowed)
        made._port = PORT  # without the thread that start() starts
        self.made.append(made)
        return made

    def see(self, made: Guard, *events: tuple[int, int]) -> dict[str, int]:
        """Let a guard see events; return what it has refused because of them."""
        self.events += events
        made._look()
        assert made.alarmed == bool(made._refused)
        return dict(made.take())


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    world = Make(monkeypatch)
    yield world
    for one in world.made:
        one.close()


@pytest.mark.parametrize(
    ("event", "reason"),
    [(SILENT, "silent"), (BROKEN, "connection"), (PROTOCOL, "encryption"), (AUTH, "unauthorised")],
)
def test_a_handshake_that_fails(make: Make, event: tuple[int, int], reason: str) -> None:
    """It counts when its connection ends, once, and has words."""
    made = make.guard()
    assert make.see(made, (ACCEPTED, 7), event) == {}
    assert make.see(made, (GONE, 7)) == {reason: 1}
    assert make.see(made) == {}
    assert reason in REASONS


def test_a_connection_that_ends_without_a_word(make: Make) -> None:
    assert make.see(make.guard(), (ACCEPTED, 7), (GONE, 7)) == {"connection": 1}


def test_counts_add_up_until_they_are_taken(make: Make) -> None:
    made = make.guard()
    for number in range(5):
        make.events += [(ACCEPTED, 7), *([SILENT] if number % 2 else []), (GONE, 7)]
        made._look()
        assert made.alarmed
    assert made.take() == {"silent": 2, "connection": 3}
    assert not made.alarmed
    assert made.take() == {}


def test_the_neighbour_may_leave(make: Make) -> None:
    """Once: what comes over its descriptor later is another connection."""
    made = make.guard()
    make.see(made, (ACCEPTED, 7))
    made.keep(7)
    assert make.see(made, (GONE, 7)) == {}
    assert make.see(made, (ACCEPTED, 7), (GONE, 7)) == {"connection": 1}


def test_a_descriptor_that_is_used_again_belongs_to_nobody(make: Make) -> None:
    """Its end was not seen, because events may be lost."""
    made = make.guard()
    make.see(made, (ACCEPTED, 7))
    made.keep(7)
    assert make.see(made) == {}
    assert make.see(made, (ACCEPTED, 7), (GONE, 7)) == {"connection": 1}


def test_a_neighbour_that_has_left_already_is_not_kept(make: Make) -> None:
    made = make.guard()
    make.see(made, (ACCEPTED, 7), (GONE, 7))
    made.keep(7)
    assert make.see(made) == {}
    assert make.see(made, (ACCEPTED, 7), (GONE, 7)) == {"connection": 1}


def test_the_oldest_makes_room(make: Make) -> None:
    """It is shut down, which makes libzmq close it, and its descriptor stays libzmq's."""
    made = make.guard(connections=3)
    assert make.see(made, *((ACCEPTED, one) for one in (4, 5, 6))) == {}
    assert make.shut == []
    assert make.see(made, (ACCEPTED, 7), (ACCEPTED, 8)) == {}
    assert make.shut == make.detached == [4, 5]
    assert make.see(made, (GONE, 4), (GONE, 5)) == {"crowd": 2}
    assert make.see(made, (GONE, 6)) == {"connection": 1}


def test_a_crowd_never_costs_the_neighbour_its_connection(make: Make) -> None:
    made = make.guard(connections=3)
    make.see(made, (ACCEPTED, 4))
    made.keep(4)
    for one in range(5, 100):
        make.see(made, (ACCEPTED, one))
    assert make.shut == list(range(5, 98))


def test_a_limit_that_the_neighbours_alone_exceed(make: Make) -> None:
    """There is nobody to close: it does not loop for ever."""
    made = make.guard(connections=1)
    for one in (4, 5):
        made.keep(one)
    make.see(made, (ACCEPTED, 4), (ACCEPTED, 5))
    assert make.shut == []


@pytest.mark.parametrize("why", ["closed", "another port"])
def test_a_descriptor_that_is_no_connection_of_the_link(make: Make, why: str) -> None:
    """libzmq has closed it meanwhile, and something else may have opened it."""
    made = make.guard(connections=1)
    if why == "closed":
        make.closed.add(4)
    else:
        make.ports[4] = PORT + 1
    assert make.see(made, (ACCEPTED, 4), (ACCEPTED, 5)) == {}
    assert make.shut == []
    assert make.detached == ([] if why == "closed" else [4])
    assert make.see(made, (GONE, 4)) == {"connection": 1}


def test_what_is_remembered_of_failures_is_bounded(make: Make) -> None:
    made = make.guard()
    make.see(made, *[SILENT] * 10_000)
    assert len(made._failed) == 1 << 12
