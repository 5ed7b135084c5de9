"""A simulated network below ZeroMQ's interface: DEALER and ROUTER as libzmq 4.3 has them.

What is modelled: pipes for each connection, high-water marks, IMMEDIATE, PROBE_ROUTER, reconnection
with back-off, fair queueing, a ROUTER that still gives out what a dead connection had brought, a
DEALER that drops it, messages that are lost with their connection, half-open connections, and sends
that fail within a multipart message.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import Any

import zmq

from dni_runtime.wire import PROTOCOL_VERSION, Kind
from tests.simulation.world import Process, World

HELLO = bytes((0x9B, PROTOCOL_VERSION, Kind.HELLO))
"""The beginning of such a message."""

DEALER_NOTICES_S, ROUTER_NOTICES_S = 15.0, 60.0
"""A connection that is half open is given up after so long: unacknowledged data, keepalive."""


class Frame:
    """A received frame."""

    def __init__(self, data: bytes, more: bool) -> None:
        self.buffer = memoryview(bytearray(data))
        self.more = more

    def get(self, option: int) -> int:
        return 0


class Line:
    """What lies between two modules."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s  # one way
        self.away_until_s = 0.0  # nothing connects before


class Network:
    """All listeners and connections."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lines: dict[str, Line] = {}
        self.listeners: dict[str, Router] = {}
        self.connections: list[Connection] = []
        # what nobody thought of: lines that stand, one way, on which messages vanish until somebody
        # asks what has arrived
        self.muted = set[str]()

    def line(self, address: str) -> Line:
        return self.lines.setdefault(address, Line(0.001))

    def swallows(self, where: str, frames: list[bytes]) -> bool:
        if frames[0].startswith(HELLO):
            self.muted.discard(where)
        return where in self.muted and bool(frames[0])

    def cut(self, address: str, *, half_open: bool, away_s: float = 0.0) -> None:
        """End what stands on a line, and let nothing connect for a while."""
        self.line(address).away_until_s = self.world.now_s + away_s
        for connection in list(self.connections):
            if connection.address == address:
                connection.end(half_open=half_open)


class Connection:
    """One connection: messages in order, each after the line's latency, until it ends."""

    def __init__(self, network: Network, address: str, dealer: Dealer, router: Router) -> None:
        random = network.world.random
        self.network, self.address = network, address
        self.dealer, self.router = dealer, router
        self.identity = b"\x00" + random.randbytes(4)
        self.ended = False
        self.up: deque[list[bytes]] = deque()
        self.down: deque[list[bytes]] = deque()
        self.under_way = {"down": 0, "up": 0}
        self._last_s = {"down": 0.0, "up": 0.0}
        network.connections.append(self)

    def carry(self, way: str, frames: list[bytes]) -> None:
        """Send a message."""
        world = self.network.world
        if self.ended or self.network.swallows(f"{self.address} {way}", frames):
            return
        latency_s = self.network.line(self.address).latency_s * world.random.uniform(0.8, 1.5)
        arrives_s = max(self._last_s[way], world.now_s + latency_s)
        self._last_s[way] = arrives_s
        self.under_way[way] += 1

        def arrive() -> None:
            self.under_way[way] -= 1
            if self.ended:
                return
            if way == "down":
                self.down.append(frames)
                world.wake(self.router.process)
            elif self.dealer.connection is self:
                self.up.append(frames)
                world.wake(self.dealer.process)

        world.at(arrives_s - world.now_s, arrive)

    def room(self, way: str) -> bool:
        mark = self.dealer.options[zmq.SNDHWM] + self.router.options[zmq.RCVHWM]
        waiting = self.down if way == "down" else self.up
        return self.under_way[way] + len(waiting) < mark

    def end(self, *, half_open: bool = False) -> None:
        """What is under way is lost; both ends notice, each in its own time."""
        if self.ended:
            return
        self.ended = True
        world, random = self.network.world, self.network.world.random
        self.network.connections.remove(self)
        if half_open:
            dealer_s = random.uniform(0, DEALER_NOTICES_S)
            router_s = random.uniform(0, ROUTER_NOTICES_S)
        else:
            latency_s = self.network.line(self.address).latency_s
            dealer_s, router_s = random.uniform(0, latency_s), random.uniform(0, latency_s)
        world.at(dealer_s, self._dealer_notices)
        world.at(router_s, self._router_notices)

    def _dealer_notices(self) -> None:
        if self.dealer.connection is self:
            self.dealer.lose()

    def _router_notices(self) -> None:
        self.router.peers.pop(self.identity, None)  # what it has brought stays to be read


class Socket:
    """What both kinds share."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.world, self.process = network, network.world, process
        self.options: dict[int, Any] = {}
        self.copy_threshold = 0
        self.closed = False
        self._frames: deque[Frame] = deque()
        self._parts: list[bytes] = []

    def setsockopt(self, option: int, value: Any) -> None:
        self.options[int(option)] = value

    def poll(self, timeout_ms: int, flags: int) -> int:
        self.world.wait(timeout_ms / 1000, self.readable)
        return int(self.readable())

    def getsockopt(self, option: int) -> int:
        self.world.check_alive()
        assert option == zmq.EVENTS
        return zmq.POLLIN * self.readable() | zmq.POLLOUT * self.writable()

    def recv(self, flags: int, copy: bool) -> Frame:
        self.world.check_alive()
        if not self._frames:
            message = self.next_message()
            if message is None:
                raise zmq.Again
            last = len(message) - 1
            self._frames.extend(Frame(bytes(part), i < last) for i, part in enumerate(message))
        return self._frames.popleft()

    def readable(self) -> bool:
        raise NotImplementedError

    def writable(self) -> bool:
        raise NotImplementedError

    def next_message(self) -> list[bytes] | None:
        raise NotImplementedError

    def monitor(self, address: str, events: int) -> None:
        pass

    def disable_monitor(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Dealer(Socket):
    """The connecting end."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network, process)
        self.connection: Connection | None = None
        self._target: str | None = None
        self._back_off_s = 0.05
        self._attempt = 0
        self._swallowing = False

    def connect(self, address: str) -> None:
        self._target = address
        self._back_off_s = 0.05
        self._later(0.0)

    def disconnect(self, address: str) -> None:
        self._target = None
        self._attempt += 1
        if self.connection is not None:
            self.connection.end()
            self.lose()

    def lose(self) -> None:
        """The connection is gone; with IMMEDIATE nothing of it is read any more."""
        self.connection = None
        if self._parts:
            self._parts, self._swallowing = [], True
        if self._target is not None:
            self._later(self._back_off_s)

    def _later(self, delay_s: float) -> None:
        self._attempt += 1
        attempt = self._attempt

        def try_it() -> None:
            if attempt != self._attempt or self._target is None or not self.process.alive:
                return
            line = self.network.line(self._target)
            router = self.network.listeners.get(self._target)
            if router is None or self.world.now_s < line.away_until_s:
                self._back_off_s = min(2 * self._back_off_s, 1.0)
                self._later(self._back_off_s * self.world.random.uniform(1.0, 1.5))
                return
            self._back_off_s = 0.05
            self.connection = Connection(self.network, self._target, self, router)
            router.peers[self.connection.identity] = self.connection
            router.pipes.append(self.connection)
            self.connection.carry("down", [b""])  # PROBE_ROUTER
            self.world.wake(self.process)

        self.world.at(delay_s + self.network.line(self._target or "").latency_s, try_it)

    def readable(self) -> bool:
        return bool(self._frames or (self.connection is not None and self.connection.up))

    def writable(self) -> bool:
        return self.connection is not None and self.connection.room("down")

    def next_message(self) -> list[bytes] | None:
        if self.connection is None or not self.connection.up:
            return None
        return self.connection.up.popleft()

    def send(self, frame: Any, flags: int, copy: bool = True) -> None:
        self.world.check_alive()
        more = bool(flags & zmq.SNDMORE)
        if self._swallowing:
            self._swallowing = more
            return
        random = self.world.random
        if self._parts and self.connection is not None and random.random() < 0.001:
            self.connection.end()  # the line breaks within a message
            self.lose()
            raise zmq.Again
        if self.connection is None or not (self._parts or self.connection.room("down")):
            raise zmq.Again
        self._parts.append(bytes(frame))
        if not more:
            parts, self._parts = self._parts, []
            self.connection.carry("down", parts)

    def close(self) -> None:
        super().close()
        self._target = None
        self._attempt += 1
        if self.connection is not None:
            connection = self.connection
            # LINGER: what was sent goes out first
            self.world.at(2 * self.network.line(connection.address).latency_s, connection.end)


class Router(Socket):
    """The listening end."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network, process)
        self.peers: dict[bytes, Connection] = {}
        self.pipes: list[Connection] = []
        self.address = ""

    def bind(self, address: str) -> None:
        if address in self.network.listeners:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self.address = address
        self.network.listeners[address] = self

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return self.address

    def readable(self) -> bool:
        return bool(self._frames) or any(pipe.down for pipe in self.pipes)

    def writable(self) -> bool:
        return True

    def next_message(self) -> list[bytes] | None:
        self.pipes = [one for one in self.pipes if one.down or not one.ended]
        full = [one for one in self.pipes if one.down]
        if not full:
            return None
        pipe = self.world.random.choice(full)
        return [pipe.identity, *pipe.down.popleft()]

    def send(self, frame: Any, flags: int, copy: bool = True) -> None:
        self.world.check_alive()
        if not self._parts:
            peer = self.peers.get(bytes(frame))
            if peer is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            if not peer.room("up"):
                raise zmq.Again
        self._parts.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            (identity, *parts), self._parts = self._parts, []
            if identity in self.peers:
                self.peers[identity].carry("up", parts)

    def close(self) -> None:
        super().close()
        self.network.listeners.pop(self.address, None)
        for connection in list(self.peers.values()):
            self.world.at(2 * self.network.line(self.address).latency_s, connection.end)


class Silent(Socket):
    """A monitor: it tells nothing."""

    def connect(self, address: str) -> None:
        pass

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return False


class Context:
    """A context of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def socket(self, kind: int) -> Socket:
        made = {int(zmq.DEALER): Dealer, int(zmq.ROUTER): Router}.get(int(kind), Silent)(
            self._network, self._process
        )
        self._process.at_end.append(lambda: vanish(made))
        return made

    def term(self) -> None:
        pass


def vanish(socket: Socket) -> None:
    """The process is gone, and the system closes its socket: without a last word."""
    if socket.closed:
        return
    socket.closed = True
    if isinstance(socket, Router):
        socket.network.listeners.pop(socket.address, None)
        for connection in list(socket.peers.values()):
            connection.end()
    elif isinstance(socket, Dealer) and socket.connection is not None:
        socket.connection.end()


class Poller:
    """``zmq.Poller`` over simulated sockets, and descriptors that stand for a signal."""

    world: World

    def __init__(self) -> None:
        self._watched: list[Any] = []

    def register(self, one: Any, flags: int) -> None:
        self._watched.append(one)

    def poll(self, timeout_ms: int) -> list[tuple[Any, int]]:
        world = self.world
        assert world.current is not None
        process = world.current.process

        def ready() -> bool:
            return any(
                process.signalled if isinstance(one, int) else one.readable()
                for one in self._watched
            )

        world.wait(timeout_ms / 1000, ready)
        return [(one, zmq.POLLIN) for one in self._watched if not isinstance(one, int)]
