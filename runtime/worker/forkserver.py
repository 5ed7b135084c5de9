"""``python -m dni_runtime.worker.forkserver``: imports torch once, and forks workers.

The first worker of a run pays for the imports, and their memory is shared. The process that starts
workers (``launch/forked.py``) is at the other end of standard input, a socket of packets: ::

    out  {}: everything is imported
    in   {"start": [ARGUMENT…]} and the descriptor of its log: forks a worker
    out  {"pid": PID}, or {"error": REASON}
    out  {"ended": PID, "code": CODE}: its exit code, or minus the signal that killed it
    in   {"reap": PID}: until then the kernel keeps its number
    in   end of file: exits; workers go on, or get the signal that the command line names

No torch code runs here but imports: a fork copies only the thread that calls it (fork(2)).
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from dni_runtime.garbage import collect_seldom, run_program
from dni_runtime.worker import __main__ as worker

PACKET_BYTES = 1 << 16


def main(arguments: Sequence[str]) -> None:
    """Serve until the other end is closed; in a worker, run it.

    The first argument is the signal for the workers at the end, or 0; others are for ``ps`` to
    show.
    """
    collect_seldom()
    from dni_runtime.core.dynamo import postpone_dynamo

    postpone_dynamo()
    import torch._dynamo  # which a worker's first step does  # noqa: F401

    import dni_runtime.worker.main  # noqa: F401

    gc.freeze()  # the pages of what is there stay shared (gc.freeze in Python's documentation)
    started = serve(socket.socket(fileno=0), int(arguments[0]))
    if started is not None:
        become(*started)


def serve(requests: socket.socket, last: int) -> tuple[list[str], int] | None:
    """Start workers, which get the signal ``last`` at the end, unless it is 0.

    Returns, in a worker, its arguments and the descriptor of its log; else None.
    """
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
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                running.remove(pid)
                exited = found.si_code == os.CLD_EXITED
                tell(requests, ended=pid, code=found.si_status if exited else -found.si_status)
        if requests.fileno() not in readable:
            continue
        try:
            packet, logs, _, _ = socket.recv_fds(requests, PACKET_BYTES, 1)
        except ConnectionError:
            packet, logs = b"", []
        if not packet:
            for pid in running if last else ():
                os.kill(pid, last)
            return None
        request = json.loads(packet)
        if "reap" in request:
            os.waitpid(request["reap"], 0)
            continue
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
                return request["start"], logs[0]
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
    run_program(lambda: main(sys.argv[1:]))
