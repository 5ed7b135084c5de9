"""Counters of a link, reported in the worker's metrics."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dni_runtime.errors import WireError

_QUIET_S = 10.0


@dataclass(slots=True)
class LinkCounters:
    """Counts of one end of a link since it was made."""

    # messages and connections, by reason (docs/wire.md, "Checks")
    refused: Counter[str] = field(default_factory=Counter)
    resent: int = 0  # transmitted again, on a new connection
    duplicates: int = 0  # dropped because they had come before
    gaps: int = 0  # ids that never came
    gradients: int = 0  # received (output end) or sent (input end)
    gradients_dropped: int = 0  # not sent because the neighbour was slow or gone
    # batches left out: the neighbour was gone and the window full, or they were not finite
    missed: int = 0
    handshakes: int = 0  # completed; more than one means reconnections

    @classmethod
    def total(cls, several: Sequence[LinkCounters]) -> LinkCounters:
        """Return the sums of several links' counters."""
        total = cls()
        for counters in several:
            total.refused.update(counters.refused)
            for name in cls.__slots__:
                if name != "refused":
                    setattr(total, name, getattr(total, name) + getattr(counters, name))
        return total


class Refusals:
    """Counter of refused messages that logs at most one line in ten seconds."""

    def __init__(self, counters: LinkCounters, link: str, log: logging.Logger) -> None:
        self._counters = counters
        self._link = link
        self._log = log
        self._quiet_until_s = 0.0

    def __call__(self, error: WireError, count: int = 1) -> None:
        """Count one refusal, or several of one kind."""
        refused = self._counters.refused
        refused[error.reason] += count
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            self._log.warning(
                "link %s: refused (%s): %s; %d refused so far",
                self._link,
                error.reason,
                error.message,
                refused.total(),
            )
