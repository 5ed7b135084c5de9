"""Runs a command for the process that starts it; run as a file, by path.

::

    python -I -S child.py tied PARENT COMMAND [ARGUMENT…]
    python -I -S child.py watch COMMAND [ARGUMENT…]
    python -I -S child.py send COMMAND [ARGUMENT…]
    python -I -S child.py receive COMMAND [ARGUMENT…]

``tied`` is replaced by the command, which gets SIGTERM when its parent dies. A wrapper instead of
``preexec_fn``: code between fork and exec is unsafe in a parent with threads, and torch starts
some.

The others exit with the command's status, 128 + n after signal n. ``watch`` forwards signals. It
stands for a container: if Apptainer's starter is setuid root, a host may hide it from its user
(proc(5), hidepid), but not its watcher.

``send`` and ``receive`` are the two ends of a connection to another host, such as ssh's. ``send``
writes the names of signals to the input of its command, the connection, and an empty line every
few seconds. ``receive``, on the other host, sends these signals to its own command, and kills it
if the input ends or is silent for too long.

This file imports the standard library only and starts in about 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_BEAT_S, _SILENT_S = 5, 25  # ssh notices a lost connection later (``schedulers/ssh.py``)
_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def main(mode: str, *arguments: str) -> NoReturn:
    command = list(arguments)
    # A shell's background job ignores these, and so would every program it starts.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if mode == "receive":
        receive(command)
    if mode == "tied":
        end_with(int(command[0]), signal.SIGTERM)
        become(command[1:])
    watch(command, send=mode == "send")


def end_with(parent: int, number: int) -> None:
    """Have this process get a signal when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        os._exit(128 + number)


def become(command: list[str]) -> NoReturn:
    """Replace this process by the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def watch(command: list[str], *, send: bool) -> NoReturn:
    """Run the command, forward signals, and exit with its status.

    ``send``: write the names of signals to its input instead.
    """
    awaited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    output, pipe = os.pipe()  # not inheritable
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if send:
            os.dup2(output, 0)
        become(command)
    os.close(output)
    while True:
        info = signal.sigtimedwait(awaited, _BEAT_S)
        if send and (info is None or info.si_signo != signal.SIGCHLD):
            name = "" if info is None else signal.Signals(info.si_signo).name
            with suppress(BrokenPipeError):  # the command is about to end
                os.write(pipe, f"{name}\n".encode())
        elif info is not None and info.si_signo != signal.SIGCHLD:
            os.kill(pid, info.si_signo)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
    end_as(status)


def end_as(status: int) -> NoReturn:
    """Exit as a process has ended, by its wait status."""
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def receive(command: list[str]) -> NoReturn:
    """Run the command in a session of its own, with the signals that the input names."""
    ready, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup)
    for number in (*_PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    me, pid = os.getpid(), os.fork()
    if pid == 0:
        os.setsid()
        end_with(me, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        become(command)
    inputs, rest = [0, ready], b""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        readable = select.select(inputs, [], [], _SILENT_S)[0]
        if ready in readable:
            for got in os.read(ready, 512):
                if got != signal.SIGCHLD:
                    os.kill(pid, got)
        read = os.read(0, 512) if 0 in readable else b""
        *lines, rest = (rest + read).split(b"\n")
        for name in filter(None, lines):
            os.kill(pid, signal.Signals[name.decode()])
        if not readable or (0 in readable and not read):  # the connection is lost
            kill_session(pid)
            inputs = [ready]
    kill_session(pid)  # the rest of it, before its id can be reused
    end_as(os.waitpid(pid, 0)[1])


def session_of(pid: int) -> int | None:
    """Return the session of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[3])  # proc(5)
    except OSError:
        return None


def kill_session(leader: int) -> None:
    """Kill a process and all of its session, which it leads or is about to lead.

    The process group is not enough: Apptainer's FUSE helpers have groups of their own, and stay
    when the starter is killed.
    """
    others = (int(name) for name in os.listdir("/proc") if name.isdigit())
    for pid in [leader, *(pid for pid in others if session_of(pid) == leader)]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
