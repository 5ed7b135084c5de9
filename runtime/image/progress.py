"""Progress reports of the library; the command line prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Step:
    """An event during a build.

    Attributes:
        subject: ``wheels``, ``base`` or a module's name.
        state: ``start`` and ``done`` of work, ``same`` if there was nothing to do, or one
            ``line`` that a program printed.
        text: The work, its result, or the line.
    """

    subject: str
    state: Literal["start", "line", "done", "same"]
    text: str = ""


Report = Callable[[Step], None]


def silent(_step: Step) -> None:
    """Report nothing."""
