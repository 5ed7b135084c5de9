"""Workers as forks of a process that has imported torch (``worker/forkserver.py``)."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from dni_runtime.documents.state import process_birth
from dni_runtime.launch.child import kill_session
from dni_runtime.worker.forkserver import PACKET_BYTES

READY_S = 20.0
"""Seconds to wait until everything is imported: others would take a silent supervisor for dead
(``launch/lease.py``). Meanwhile workers are started without the server."""

_END_S = 5.0
_ANSWER_S = 10.0


class ForkServer:
    """Starts workers of one environment; raises ``OSError`` if it cannot be started.

    ``ps`` shows ``name`` beside its own name. Tied workers get SIGTERM when this process dies.
    """

    def __init__(self, python: str, environ: Mapping[str, str], name: str, *, tied: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        last = int(signal.SIGTERM) if tied else 0
        with theirs:
            self._popen = popen = subprocess.Popen(
                # -P: do not import torch from the current folder.
                [python, "-P", "-m", "dni_runtime.worker.forkserver", str(last), name],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # looking for a GPU while importing spoils it for forks (torch.cuda.is_available)
                env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environ},
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._socket, popen)
        self.lives = True
        self._ready = self._receive(READY_S) is not None

    def start(self, arguments: Sequence[str], log: int) -> ForkedProcess | None:
        """Start a worker; None if the server is gone, or still imports.

        ``log`` is the descriptor of the file for its output. Raises ``OSError`` if the worker
        cannot be started.
        """
        self._ready = self._ready or self._receive() is not None
        if not self._ready:
            return None
        self._send({"start": list(arguments)}, log)
        while self.lives:
            while (message := self._receive(_ANSWER_S)) is not None:
                if "error" in message:
                    raise OSError(message["error"])
                if "pid" in message:
                    return ForkedProcess(self, message["pid"])
            if self.lives:
                self.give_up()
        return None

    def code(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended, or minus the signal that killed it."""
        while self.lives and self._receive() is not None:
            pass
        return self._codes.get(pid)

    def reap(self, pid: int) -> None:
        """Let the kernel use the number of a worker that has ended for others."""
        del self._codes[pid]
        self._send({"reap": pid})

    def give_up(self) -> None:
        """End a server that does not answer: it must not start later what another one has."""
        self._popen.kill()
        try:
            self._popen.wait(_END_S)  # what it has said before is still read
        except subprocess.TimeoutExpired:
            self.lives = False

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        self._socket.settimeout(_ANSWER_S)
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
        except ConnectionError:
            self.lives = False
        except TimeoutError:
            self.give_up()

    def _receive(self, within_s: float = 0.0) -> dict[str, Any] | None:
        """Return the next message; None if there is none."""
        self._socket.settimeout(within_s)
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except (BlockingIOError, TimeoutError):
            return None
        except ConnectionError:
            packet = b""
        if not packet:
            self.lives = False
            return None
        message: dict[str, Any] = json.loads(packet)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


class ForkedProcess:
    """A worker that a server has forked, in a session of its own."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._born = process_birth(pid)
        self._gone_s: float | None = None
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            code = self._server.code(self.pid)
            if code is not None:
                self.kill()  # the rest of its session, before its id can be reused
                self._server.reap(self.pid)
                self._code = code
            elif self._born is None or process_birth(self.pid) != self._born:
                self._gone_s = self._gone_s or time.monotonic()
                if not self._server.lives:
                    self._code = -signal.SIGKILL  # nobody knows, but its last report
                elif time.monotonic() >= self._gone_s + _ANSWER_S:
                    self._server.give_up()
        return self._code

    def kill(self) -> None:
        if self._code is None:
            kill_session(self.pid)


def _end(requests: socket.socket, popen: subprocess.Popen[bytes]) -> None:
    requests.close()
    try:
        popen.wait(_END_S)
    except subprocess.TimeoutExpired:  # it still imports
        popen.kill()
        popen.wait()
