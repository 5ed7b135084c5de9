"""Replaces itself with a command that is told when its parent is gone; run as a file, by path.

::

    python -I -S child.py PARENT SIGNAL COMMAND [ARGUMENT…]

A wrapper instead of ``preexec_fn``: code between fork and exec is unsafe in a parent with threads,
and torch starts some. It imports the standard library only and starts in about 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); kept over execve(2), cleared in children made by fork(2)


def main(arguments: list[str]) -> None:
    parent, number, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before prctl
        sys.exit(128 + number)
    # A shell's background job ignores these, and so would every program it starts.
    for one in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(one, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
