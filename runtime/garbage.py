"""Objects made by imports stay: Python looks for no garbage in them, and never frees them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

_USUAL = gc.get_threshold()
_SELDOM = 100_000


def collect_seldom() -> None:
    """Have Python look for garbage seldom, and not when the process ends.

    ``import torch`` makes half a million objects that stay. Looking through them again and again
    while they are made, and once more at the end, is a third of the time of a process that does
    little else. (gc.freeze and gc.set_threshold in Python's documentation.)
    """
    gc.set_threshold(_SELDOM, *_USUAL[1:])
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Look for garbage as Python does by default, but not among objects that exist already."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


def run_program(main: Callable[[], object]) -> NoReturn:
    """Run a program's main function, and end the process with its exit code.

    All happens that belongs to the end of a process (threads are waited for, :mod:`atexit`), but
    what is in memory goes with the process. Python would free each of torch's objects, which takes
    0.3 s of CPU, and in a fork copies the pages that it shares with the others; and torch would
    take its own operators apart (weakref.finalize's atexit), which takes 0.05 s in a fork.
    """
    logging.raiseExceptions = False  # a disk that is full has no room for the log, either
    code = 0
    try:
        main()
    except SystemExit as error:
        code = int(error.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        call = finalizer.peek()
        if call is not None and getattr(call[1], "__module__", None) == "torch.library":
            finalizer.atexit = False
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()
    os._exit(code)
