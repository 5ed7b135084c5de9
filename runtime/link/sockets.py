"""The one place that makes ZeroMQ sockets and does I/O on them.

Every socket gets its limits here, so that none is without them, and ZeroMQ's errors become this
package's errors here. Encryption (CURVE, ZeroMQ RFC 25 and 26) is set here too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as posix
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import zmq

from dni_runtime.errors import DataError, UnavailableError, WorkerError
from dni_runtime.run.keys import KeyPair
from dni_runtime.wire import Buffer

Socket = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]

_LINGER_MS = 1000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000
# After a network was away TCP waits long before it tries again, in the end minutes (RFC 6298, 5.5).
# A new connection tries at once: so what is not acknowledged (TCP_USER_TIMEOUT, RFC 5482) or does
# not connect is given up early.
_UNACKNOWLEDGED_MS, _CONNECT_MS = 10_000, 5_000
_HANDSHAKE_MS = 10_000
_BACKLOG = 256  # a full queue costs a neighbour a second: the kernel lets it ask again
# below this a copy is cheaper than a shared frame, which wakes a thread of pyzmq when it is sent
_COPY_BYTES = 1 << 18
# plain integers: operations on zmq's enumerations cost microseconds for each frame
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
_EVENT = struct.Struct("=HI")  # zmq_socket_monitor(3): event, value

PATH_BYTES = 107
"""unix(7): ``sun_path`` has 108 bytes with the closing zero."""


def open_context() -> Context:
    """A context with one I/O thread (a second one does not speed up one connection)."""
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 64)
    return context


def output_socket(context: Context, *, window: int, frame_limit: int) -> Socket:
    """A DEALER: sends activations and markers, gets acknowledgements and gradients.

    ``window`` is the number of unacknowledged messages that the link allows, ``frame_limit`` the
    bytes of the largest frame that may come.
    """
    socket = context.socket(zmq.DEALER)
    # without IMMEDIATE messages would queue for a neighbour that is not there, and the probe
    # would be sent for the first connection only (zmq_setsockopt(3))
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.PROBE_ROUTER, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    _limit(socket, window, frame_limit)
    return socket


def input_socket(context: Context, *, window: int, frame_limit: int) -> Socket:
    """A ROUTER: gets activations and markers, sends acknowledgements and gradients.

    Identities are ZeroMQ's own, a new one for each connection: without ROUTER_HANDOVER nobody can
    take over another one's. See :func:`output_socket` for the parameters.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    _limit(socket, window, frame_limit)
    return socket


def _limit(socket: Socket, window: int, frame_limit: int) -> None:
    """Options of both ends: nothing unbounded, no peer that is gone without being noticed."""
    # per connection; up to two messages up for each one down, and a few for the handshake
    socket.setsockopt(zmq.SNDHWM, 2 * window + 16)
    socket.setsockopt(zmq.RCVHWM, 2 * window + 16)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_limit)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # No ZMTP heartbeats: libzmq takes a frame that is longer under way than their timeout for
    # silence (zeromq/libzmq#2709). TCP itself notices a neighbour that is gone.
    socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.copy_threshold = _COPY_BYTES


def encrypt_input(socket: Socket, pair: KeyPair) -> None:
    """Let a socket that will listen accept only CURVE, and only peers that a ZAP handler lets in.

    Without ZAP_ENFORCE_DOMAIN libzmq lets everybody in if no handler answers (zmq_setsockopt(3)).
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"dni")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def encrypt_output(socket: Socket, pair: KeyPair, server: bytes) -> None:
    """Let a socket connect by CURVE, only to the owner of a key."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    try:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    except zmq.ZMQError:
        raise DataError(
            f"the neighbour's public key {server.decode(errors='replace')!r} is damaged",
            hint="restart the module downstream: it publishes its key again",
        ) from None


def leave_plain(socket: Socket) -> None:
    """Let a socket connect without encryption from now on."""
    socket.setsockopt(zmq.CURVE_SERVER, 0)


def monitor(socket: Socket, context: Context, events: int) -> Socket:
    """A socket that tells events of another one (zmq_socket_monitor(3)); it MUST be read."""
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, events)
    reader = context.socket(zmq.PAIR)
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(address)
    return reader


def next_event(reader: Socket) -> tuple[int, int] | None:
    """A monitor's next event and its value, or None if there is none."""
    try:
        if not int(reader.getsockopt(zmq.EVENTS)) & _READABLE:
            return None
        event, _ = reader.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    number, value = _EVENT.unpack(event)
    return number, value


def bind(socket: Socket, address: str) -> str:
    """Listen; return the actual address, with the port that was chosen for ``:*``."""
    if address.startswith("ipc://"):
        check_path(Path(address.removeprefix("ipc://")))
    if "[" in address:
        allow_ipv6(socket)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise cannot_listen(address, error.errno) from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def check_path(path: Path) -> None:
    """Check that a Unix socket can be made here; a dead process's file is no obstacle.

    libzmq removes whatever lies at the path, so this must run first. Raises ``UnavailableError`` if
    the path is too long, its folder is missing, or it exists and is not a socket that a dead
    process of this user left.
    """
    if len(os.fsencode(path)) > PATH_BYTES:
        raise UnavailableError(
            f"the socket's path {str(path)!r} is longer than {PATH_BYTES} bytes",
            hint="set XDG_RUNTIME_DIR to a folder with a shorter path",
        )
    try:
        status = path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UnavailableError(f"the socket folder {str(path.parent)!r} is missing") from None
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise UnavailableError(
            f"{str(path)!r} is in the way: it is not a socket of this user", hint="remove it"
        )
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # a full backlog (EAGAIN) means that it is alive, too
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise UnavailableError(
                f"another process listens on {str(path)!r}",
                hint="a worker of this run is still alive: see 'dnictl ps', end it with "
                "'dnictl stop'",
            )


class SocketFile:
    """The file of an ``ipc://`` address that this process listens at; libzmq leaves it there."""

    def __init__(self, address: str) -> None:
        self._path = Path(address.removeprefix("ipc://"))
        self._made = self._there()

    def _there(self) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            status = self._path.lstat()
            return status.st_dev, status.st_ino
        return None

    def remove(self) -> None:
        """Remove it, unless another process has replaced it."""
        if self._made is not None and self._there() == self._made:
            self._path.unlink(missing_ok=True)


def connect(socket: Socket, address: str) -> None:
    """Start to connect; ZeroMQ goes on trying until it succeeds."""
    if "[" in address:
        allow_ipv6(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise DataError(
            f"cannot connect to {address!r}: {error.strerror}",
            hint="an address is ipc://PATH or tcp://IP:PORT",
        ) from None


def disconnect(socket: Socket, address: str) -> None:
    """Leave an address that :func:`connect` was given."""
    with contextlib.suppress(zmq.ZMQError):  # the connection may have ended by itself
        socket.disconnect(address)


def allow_ipv6(socket: Socket) -> None:
    """Let names lead to IPv6 addresses, if they have any; else they lead to IPv4 ones alone."""
    socket.setsockopt(zmq.IPV6, 1)


def cannot_listen(address: str, code: int | None) -> UnavailableError:
    """The error of an address that cannot be listened on."""
    if code == errno.EADDRINUSE:
        port = address.rpartition(":")[2]
        return UnavailableError(
            f"cannot listen on {address}: it is in use",
            location=("links", "port"),
            hint="choose another 'links.port', or leave it out for one that is free; "
            f"'ss -ltnp sport = :{port}' shows who uses it",
        )
    if code in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return UnavailableError(
            f"cannot listen on {address}: this machine does not have that address",
            location=("links", "interface"),
            hint="set 'links.interface' to one that 'ip -brief address' shows",
        )
    return UnavailableError(
        f"cannot listen on {address}: {zmq.strerror(code or 0)}",
        location=("links",),
        hint="check 'links' in chain.yaml and the socket folder's permissions",
    )


def send(socket: Socket, frames: Sequence[Buffer]) -> bool:
    """Hand a message to ZeroMQ, without waiting and, if it is large, without copying.

    Returns False if the peer is gone or does not keep up.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        try:
            socket.send(frame, _MORE if index < last else _LAST, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, zmq.EHOSTUNREACH):
                raise WorkerError(f"sending failed: {error.strerror}") from error
            if 0 < index < last:
                # the connection ended within the message: libzmq swallows its remaining frames,
                # and would swallow the next message's first ones in their place (libzmq's lb.cpp)
                _swallow(socket, last - index)
            return False
    return True


def _swallow(socket: Socket, frames: int) -> None:
    for index in range(frames):
        with contextlib.suppress(zmq.ZMQError):
            socket.send(b"", _MORE if index < frames - 1 else _LAST)


def receive(socket: Socket, limit: int) -> list[zmq.Frame] | None:
    """Return a waiting message, as frames that own their memory; None if there is none.

    At most ``limit`` frames are kept, and one more, which tells that there were too many; the
    others are dropped.
    """
    frames: list[zmq.Frame] = []
    try:
        # asking first is four times cheaper than an exception for an empty socket
        if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
            return None
        while True:
            frame = socket.recv(_LAST, copy=False)
            if len(frames) <= limit:
                frames.append(frame)
            if not frame.more:
                return frames
    except zmq.Again:
        return None
    except zmq.ZMQError as error:
        raise WorkerError(f"receiving failed: {error.strerror}") from error


def has_peer(socket: Socket) -> bool:
    """Whether an output socket has a connection that takes messages."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _WRITABLE)


def buffers(frames: Sequence[zmq.Frame]) -> list[Buffer]:
    """Views of the frames' memory, which they keep alive."""
    return [frame.buffer for frame in frames]


def descriptor(frame: zmq.Frame) -> int:
    """The file descriptor of the connection that a frame came over (zmq_msg_get(3))."""
    return int(frame.get(zmq.SRCFD))


def wait(socket: Socket, timeout_s: float) -> None:
    """Wait until there is a message, or the time is over."""
    try:
        socket.poll(max(0, round(timeout_s * 1000)), zmq.POLLIN)
    except zmq.ZMQError as error:
        raise WorkerError(f"waiting for a message failed: {error.strerror}") from error


def close(socket: Socket, context: Context) -> None:
    """Close a socket and its context; waits a second at most for what is to be sent."""
    socket.close()
    context.term()
