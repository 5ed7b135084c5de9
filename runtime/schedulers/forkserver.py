"""Workers as forks of a process that has imported torch: both ends.

The first worker of a run pays for the imports, and their memory is shared. The server is
``python -m dni_runtime.schedulers.forkserver``; standard input is its end of a packet socket: ::

    out  {}: everything is imported
    in   {"start": [ARGUMENT…]} and the descriptor of its log: forks a worker
    out  {"pid": PID}, or {"error": REASON}
    out  {"ended": PID, "code": CODE}: its exit code, or minus the signal that killed it; its
         session has been killed
    in   end of file: exits; workers continue

No torch code runs in it but imports: a fork copies only the thread that calls it (fork(2)).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from dni_runtime.garbage import collect_seldom, run_program
from dni_runtime.schedulers.child import kill_session
from dni_runtime.worker import __main__ as worker

READY_S = 20.0
"""The longest wait for the fork server, in seconds. After that the supervisor's lease would run out
(``run/lease.py``), and workers are started without the server."""

_END_S = 5.0
_ANSWER_S = 10.0
_PACKET_BYTES = 1 << 16


class ForkServer:
    """Starts workers of one environment; raises ``OSError`` if it cannot be started.

    ``ps`` shows ``name`` beside its own name.
    """

    def __init__(self, python: str, environ: Mapping[str, str], name: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        with theirs:
            self._popen = popen = subprocess.Popen(
                # -P: do not import torch from the current folder.
                [python, "-P", "-m", "dni_runtime.schedulers.forkserver", name],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # looking for a GPU while importing spoils it for forks (torch.cuda.is_available)
                env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environ},
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._socket, popen)
        self._lives = True
        self._ready = self._receive(READY_S) is not None

    def start(self, arguments: Sequence[str], log: int) -> int | None:
        """Start a worker; return its process id, or None if the server is gone or still imports.

        ``log`` is the descriptor of the file for its output. Raises ``OSError`` if the worker
        cannot be started.
        """
        self._ready = self._ready or self._receive() is not None
        if not (self._ready and self._lives):
            return None
        request = json.dumps({"start": list(arguments)}).encode()
        self._socket.settimeout(_ANSWER_S)
        try:
            socket.send_fds(self._socket, [request], [log])
            while (message := self._receive(_ANSWER_S)) is not None:
                if "error" in message:
                    raise OSError(message["error"])
                if "pid" in message:
                    return int(message["pid"])
        except (ConnectionError, TimeoutError):
            pass
        self._give_up()
        return None

    def code(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended, or minus the signal that killed it.

        None if the server is gone, and has not said it.
        """
        while pid not in self._codes and self._receive(_ANSWER_S) is not None:
            pass
        if pid not in self._codes:
            self._give_up()
        return self._codes.pop(pid, None)

    def _give_up(self) -> None:
        """End a server that does not answer: it must not start later what another one has."""
        self._lives = False
        self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_S)  # what it has said before is still read

    def _receive(self, within_s: float = 0.0) -> dict[str, Any] | None:
        """Return the next message; None if there is none."""
        self._socket.settimeout(within_s)
        try:
            packet = self._socket.recv(_PACKET_BYTES)
        except (BlockingIOError, TimeoutError, ConnectionError):
            return None
        if not packet:  # the server is gone
            return None
        message: dict[str, Any] = json.loads(packet)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


def _end(requests: socket.socket, popen: subprocess.Popen[bytes]) -> None:
    requests.close()
    try:
        popen.wait(_END_S)
    except subprocess.TimeoutExpired:  # it still imports
        popen.kill()
        popen.wait()


def main() -> None:
    """Serve until the other end is closed; in a worker, run it."""
    collect_seldom()
    from dni_runtime.core.dynamo import postpone_dynamo

    postpone_dynamo()
    import torch._dynamo  # which a worker's first step does  # noqa: F401

    import dni_runtime.worker.main  # noqa: F401

    gc.freeze()  # the pages of what is there stay shared (gc.freeze in Python's documentation)
    if (started := serve(socket.socket(fileno=0))) is not None:
        become(*started)


def serve(requests: socket.socket) -> tuple[list[str], int] | None:
    """Start workers; return, in a worker, its arguments and its log's descriptor; else None."""
    ended, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    requests.sendall(b"{}")  # everything is imported
    while True:
        readable, *_ = select.select([requests.fileno(), ended], [], [])
        if ended in readable:
            os.read(ended, 512)
        for pid in list(running):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                kill_session(pid)  # the rest of it, before its id can be reused
                running.remove(pid)
                tell(requests, ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if requests.fileno() not in readable:
            continue
        try:
            packet, logs, _, _ = socket.recv_fds(requests, _PACKET_BYTES, 1)
        except ConnectionError:
            packet, logs = b"", []
        if not packet:
            return None
        try:
            pid = os.fork()
        except OSError as error:
            tell(requests, error=str(error))
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (ended, wakeup):
                    os.close(descriptor)
                requests.detach()
                return json.loads(packet)["start"], logs[0]
            running.add(pid)
            tell(requests, pid=pid)
        for descriptor in logs:
            os.close(descriptor)


def tell(requests: socket.socket, **message: object) -> None:
    """Send a message, if the other end is still there."""
    try:
        requests.sendall(json.dumps(message).encode())
    except ConnectionError:
        return  # its end is read next


def become(arguments: list[str], log: int) -> None:
    """Run a worker in this process, in a session of its own, with its output in its log."""
    import numpy as np
    import setproctitle

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    # A shell's background job ignores these, and so would every program it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    np.random.seed()  # else users' code would draw the same in all workers
    sys.argv = ["dni-worker", *arguments]
    setproctitle.setproctitle(" ".join(sys.argv))
    worker.main()


if __name__ == "__main__":
    run_program(main)
