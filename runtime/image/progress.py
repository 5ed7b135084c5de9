"""How the library tells what it is doing; printing is the command line's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened during a build.

    Attributes:
        subject: What it is about: ``wheels``, ``base`` or a module's name.
        state: ``start`` and ``done`` of work, ``same`` when there was nothing to do, or one
            ``line`` that a program printed.
        text: What is being done, what came out of it, or the line.
    """

    subject: str
    state: Literal["start", "line", "done", "same"]
    text: str = ""


Report = Callable[[Step], None]


def silent(_step: Step) -> None:
    """Report nothing."""
