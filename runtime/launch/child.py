"""Starts a command that gets a signal when its parent dies; run as a file, by path.

::

    python -I -S child.py exec  PARENT SIGNAL COMMAND [ARGUMENT…]
    python -I -S child.py watch PARENT SIGNAL COMMAND [ARGUMENT…]

SIGNAL is sent when the parent dies; 0: the command continues.

``exec`` is replaced by the command. ``watch`` runs it as a child, forwards signals and exits with
its status: for programs that lose a parent-death signal, as Apptainer's starter does when it
changes its credentials (prctl(2), PR_SET_PDEATHSIG).

A wrapper instead of ``preexec_fn``: code between fork and exec is unsafe in a parent with threads,
and torch starts some. It imports the standard library only and starts in about 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def main(arguments: list[str]) -> NoReturn:
    """Run the command line."""
    mode, parent, number, command = (
        arguments[0],
        int(arguments[1]),
        int(arguments[2]),
        arguments[3:],
    )
    if number:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent:  # it died before prctl
            sys.exit(128 + number)
    # A shell's background job ignores these, and so would every program it starts.
    for one in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(one, signal.SIG_DFL)
    if mode == "watch":
        watch(command)
    become(command)


def become(command: list[str]) -> NoReturn:
    """Replace this process by the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def watch(command: list[str]) -> NoReturn:
    """Run the command, forward signals, and exit with its status."""
    awaited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        become(command)
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(pid, number)
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
