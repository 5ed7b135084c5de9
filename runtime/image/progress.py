"""Progress reports of the library; the command line prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Step:
    """An event during a build."""

    subject: str  # wheels, base or a module's name
    state: Literal["start", "line", "done", "same"]  # same: nothing to do; line: a program's output
    text: str = ""  # the work, its result, or the line


Reporter = Callable[[Step], None]


def silent(_step: Step) -> None:
    """Report nothing."""
