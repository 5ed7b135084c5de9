"""Admission to an input end: ZeroMQ authentication, and a limit on connections.

For each CURVE handshake ZeroMQ asks whether to accept the peer's key (ZAP, ZeroMQ RFC 27) and
holds the connection until it gets an answer. A separate thread answers, because the computing
thread may be busy for seconds. It also reads the socket's monitor, whose queue would otherwise fill
up and block ZeroMQ's I/O thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket as posix
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

import zmq
from zmq.utils import z85

from dni_runtime.errors import DataError
from dni_runtime.link import sockets

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""Maximum connections of one input end. One is the peer's; the others are not identified yet, and
the oldest of them is closed for a new one, as in a defence against SYN floods."""

REASONS = {
    "unauthorised": "a connection with a key that is not the upstream module's",
    "encryption": "a connection without encryption, or with another key than this module's",
    "silent": "a connection that sent nothing",
    "crowd": f"more than {CONNECTIONS} connections at once",
    "connection": "a connection that ended in its handshake, or broke the protocol",
}
"""Reasons to refuse a connection before it has sent a message, in words."""

_ZAP = "inproc://zeromq.zap.01"
_KEY_BYTES = 32
_LOOK_AGAIN_S = 1.0
_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "connection",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "encryption",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "unauthorised",
}
_ACCEPTED, _GONE = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
_NO_DETAIL = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_EVENTS = sum(_FAILED) | _ACCEPTED | _GONE


class AllowList:
    """The one key that may connect, reread when another key comes, since it may appear late.

    ``read`` returns it in Z85, or None while there is none.
    """

    def __init__(self, read: Callable[[], bytes | None]) -> None:
        self._read = read
        self._key: bytes | None = None
        self._again_s = 0.0

    def __call__(self, key: bytes) -> bool:
        """Return whether a peer with this key (32 bytes) may connect."""
        if key == self._key:
            return True
        now_s = time.monotonic()
        if now_s < self._again_s:  # strangers must not cause file reads all the time
            return False
        self._again_s = now_s + _LOOK_AGAIN_S
        try:
            text = self._read()
        except DataError as error:
            log.error("%s", error)
            return False
        self._key = None if text is None else z85.decode(text)
        return key == self._key


class Guard:
    """Authentication and connection limit of one input end's socket."""

    def __init__(
        self,
        context: sockets.Context,  # only one encrypted input end may use it
        socket: sockets.Socket,  # not listening yet
        # whether a key may connect; None if the link is not encrypted
        allowed: Callable[[bytes], bool] | None,
    ) -> None:
        self.alarmed = False  # a connection was refused since the last take()
        self._allowed = allowed
        self._watched = socket
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._open: OrderedDict[int, None] = OrderedDict()
        self._kept: deque[int] = deque()
        self._peers: set[int] = set()
        self._dropped: set[int] = set()
        self._failed: deque[str] = deque(maxlen=1 << 12)
        self._port = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._monitor = sockets.monitor(socket, context, _EVENTS)
        self._zap = None
        if allowed is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP)
        self._thread = threading.Thread(target=self._run, name="link guard", daemon=True)

    def start(self, port: int) -> None:
        """Start the thread when the socket listens on a port."""
        self._port = port
        self._thread.start()

    def keep(self, descriptor: int) -> None:
        """Keep connection ``descriptor``, the accepted peer's: never close it for others."""
        self._kept.append(descriptor)

    def take(self) -> Counter[str]:
        """Return what was refused since the last call, by reason (docs/wire.md, "Checks")."""
        with self._lock:
            taken, self._refused = self._refused, Counter()
            self.alarmed = False
        return taken

    def close(self) -> None:
        """Stop the thread; call before the socket is closed."""
        self._watched.disable_monitor()
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._monitor.close()
        if self._zap is not None:
            self._zap.close()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._wake, self._monitor, self._zap):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                return
            if self._zap in ready:
                self._answer()
            if self._monitor in ready:
                self._look()

    def _answer(self) -> None:
        """Answer one authentication request."""
        assert self._zap is not None
        assert self._allowed is not None
        frames = self._zap.recv_multipart()
        # version, request, domain, address, identity, mechanism, credentials (RFC 27)
        welcome = (
            len(frames) == 7
            and frames[5] == b"CURVE"
            and len(frames[6]) == _KEY_BYTES
            and self._allowed(frames[6])
        )
        status, text = (b"200", b"OK") if welcome else (b"400", b"not this link's neighbour")
        self._zap.send_multipart([b"1.0", frames[1], status, text, b"", b""])

    def _look(self) -> None:
        """Process all events, then enforce the limit."""
        refused: Counter[str] = Counter()
        kept = [self._kept.popleft() for _ in range(len(self._kept))]
        self._peers.update(peer for peer in kept if peer in self._open)  # before it may be gone
        while (event := sockets.next_event(self._monitor)) is not None:
            kind, value = event
            if kind == _ACCEPTED:
                self._peers.discard(value)  # the system reuses descriptors
                self._open[value] = None
            elif kind == _GONE:
                reason = self._why_gone(value)
                if reason is not None:
                    refused[reason] += 1
            elif kind == _NO_DETAIL and value == errno.EAGAIN:
                self._failed.append("silent")
            else:
                self._failed.append(_FAILED[kind])
        self._peers.update(peer for peer in kept if peer in self._open)  # or was accepted just now
        while len(self._open) > CONNECTIONS and self._drop_oldest():
            pass
        if refused:
            with self._lock:
                self._refused += refused
                self.alarmed = True

    def _why_gone(self, descriptor: int) -> str | None:
        """Return why a connection ended; None for the peer's.

        The event of a failed handshake comes earlier, but does not name the connection. A peer that
        sends no ZMTP, or too much, is disconnected without such an event.
        """
        self._open.pop(descriptor, None)
        reason = self._failed.popleft() if self._failed else None
        if descriptor in self._dropped:
            self._dropped.remove(descriptor)
            return "crowd"
        if descriptor in self._peers:
            self._peers.remove(descriptor)
            return reason
        return reason or "connection"

    def _drop_oldest(self) -> bool:
        """Close the oldest connection that is not the peer's; return False if there is none."""
        oldest = next((peer for peer in self._open if peer not in self._peers), None)
        if oldest is None:
            return False
        del self._open[oldest]
        with contextlib.suppress(OSError):  # libzmq may have closed it meanwhile
            connection = posix.socket(fileno=oldest)
            try:
                if connection.getsockname()[1] == self._port:
                    connection.shutdown(posix.SHUT_RDWR)
                    self._dropped.add(oldest)
            finally:
                connection.detach()
        return True
