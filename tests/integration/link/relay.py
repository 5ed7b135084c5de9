"""A line between two ends, which breaks when it is told to, and keeps what goes by."""

from __future__ import annotations

import select
import socket
import threading
from typing import Self


class Relay:
    """Forwards TCP connections from its address on loopback to ``target``.

    ``connections`` counts them; ``carried`` are the bytes of the newest, in both directions.
    ``down`` is what connecting sides have sent, ``up`` the listening side. If ``swallows`` is set,
    it keeps what connecting sides send to itself, from then on.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = self.carried = 0
        self.down, self.up = bytearray(), bytearray()
        self.swallows = False
        self._other: dict[socket.socket, socket.socket] = {}
        self._callers: set[socket.socket] = set()
        self._cut, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def cut(self) -> None:
        self._cut.set()

    def _run(self) -> None:
        while not self._done.is_set():
            ready, _, _ = select.select([self._listener, *self._other], [], [], 0.01)
            if self._cut.is_set():
                self._cut.clear()
                self._close_all()
                continue
            for end in ready:
                if end is self._listener:
                    self._accept()
                elif end in self._other:
                    self._forward(end)
        self._close_all()
        self._listener.close()

    def _accept(self) -> None:
        near = self._listener.accept()[0]
        try:
            far = socket.create_connection(self._target)
        except ConnectionRefusedError:  # nobody listens yet
            near.close()
            return
        self._other |= {near: far, far: near}
        self._callers.add(near)
        self.carried = 0
        self.connections += 1

    def _forward(self, end: socket.socket) -> None:
        calls = end in self._callers
        try:
            data = end.recv(1 << 16)
            kept = self.down if calls else self.up
            kept += data
            if not (calls and self.swallows):
                self._other[end].sendall(data)
            self.carried += len(data)
        except OSError:
            data = b""
        if not data:
            other = self._other.pop(end)
            del self._other[other]
            self._callers -= {end, other}
            end.close()
            other.close()

    def _close_all(self) -> None:
        for end in self._other:
            end.close()
        self._other.clear()
        self._callers.clear()
