"""Sending message by message, against a socket that fails when it is told to."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import zmq

from dni_runtime.errors import WorkerError
from dni_runtime.link import sockets


class FailingSocket:
    """Fails once, at the part of this number."""

    def __init__(self, at: int | None = None, code: int = errno.EAGAIN) -> None:
        self._at = at
        self._code = code
        self.parts: list[tuple[bytes, bool]] = []

    def send(self, part: bytes, flags: int, copy: bool = True) -> None:
        assert flags & zmq.NOBLOCK
        self.parts.append((part, bool(flags & zmq.SNDMORE)))
        if len(self.parts) - 1 == self._at:
            raise zmq.Again() if self._code == errno.EAGAIN else zmq.ZMQError(self._code)


def send(socket: Any) -> bool:
    return sockets.send(socket, [b"a", b"b", b"c", b"d"])


def test_a_whole_message() -> None:
    socket = FailingSocket()
    assert send(socket)
    assert socket.parts == [(b"a", True), (b"b", True), (b"c", True), (b"d", False)]


@pytest.mark.parametrize("code", [errno.EAGAIN, zmq.EHOSTUNREACH])
def test_a_peer_that_is_gone_gets_nothing(code: int) -> None:
    socket = FailingSocket(0, code)
    assert not send(socket)
    assert len(socket.parts) == 1


def test_a_connection_that_ends_within_a_message() -> None:
    """libzmq drops what follows up to the message's last part, which must therefore be sent."""
    socket = FailingSocket(1)
    assert not send(socket)
    assert socket.parts == [(b"a", True), (b"b", True), (b"", True), (b"", False)]


def test_a_connection_that_ends_at_the_last_part() -> None:
    socket = FailingSocket(3)
    assert not send(socket)
    assert len(socket.parts) == 4


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(WorkerError, match="sending failed: "):
        send(FailingSocket(0, zmq.ETERM))
