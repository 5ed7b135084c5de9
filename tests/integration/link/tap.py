"""Forwards one connection, and keeps what goes by: what somebody on the network sees."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Tap:
    """Listens on loopback (``address``) for one connection, and passes it on to ``target``.

    ``down`` is what the connecting side has sent, ``up`` the listening side. If ``swallows`` is
    set, it keeps what the connecting side sends to itself, from then on.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._server]
        self._threads: list[threading.Thread] = []
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.down, self.up = bytearray(), bytearray()
        self.swallows = False

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        try:
            caller, _ = self._server.accept()
        except OSError:
            return
        callee = socket.create_connection(self._target)
        self._sockets += [caller, callee]
        self._start(self._pass_on, caller, callee, self.down)
        self._start(self._pass_on, callee, caller, self.up)

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                if not (self.swallows and kept is self.down):
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)
