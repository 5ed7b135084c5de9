"""When Python looks for garbage: not among what an import has brought, which stays."""

from __future__ import annotations

import atexit
import gc

_USUAL = gc.get_threshold()
_SELDOM = 100_000


def collect_seldom() -> None:
    """Have Python look for garbage seldom from now on, and not when the process ends.

    ``import torch`` makes half a million objects that stay. Looking through them again and again
    while they are made, and once more at the end, is a third of the time of a process that does
    little else. (gc.freeze and gc.set_threshold in Python's documentation.)
    """
    gc.set_threshold(_SELDOM, *_USUAL[1:])
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Look for garbage as Python does by default, but not among the objects that are there now."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
