"""Counters of all links of a worker, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from dni_runtime.link import LinkCounters
from dni_runtime.worker.exchange import Exchange
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join


@dataclass(frozen=True)
class LinkFigures:
    """Counters of a worker's links."""

    window: int | None = None  # of the fullest link downstream; None for the tail
    in_flight: int = 0  # messages on that link
    connected: bool | None = None  # all links downstream; None for the tail
    gradients_dropped: int = 0  # that could not be sent upstream
    refused: dict[str, int] = field(default_factory=dict)  # messages, by reason
    missed: int = 0  # batches left out; see LinkCounters
    replayed: int = 0  # batches trained on again, because the module upstream was gone
    resent: int = 0  # messages, to a restarted neighbour
    duplicates: int = 0  # messages that had already come
    gaps: int = 0  # ids that never came
    shared_bytes: int | None = None  # sent to the module's other replicas; None if it has none

    @classmethod
    def of(
        cls, input: Join | None, output: Fanout | None, exchange: Exchange | None, replayed: int
    ) -> Self:
        """Collect the figures of the links that a worker has."""
        up = LinkCounters() if input is None else input.counters
        down = LinkCounters() if output is None else output.counters
        beside = LinkCounters() if exchange is None else exchange.counters
        return cls(
            window=None if output is None or not output.links else output.fullest.window,
            in_flight=0 if output is None or not output.links else output.fullest.in_flight,
            connected=None if output is None else output.connected,
            gradients_dropped=up.gradients_dropped,
            refused=dict(up.refused + beside.refused),
            missed=down.missed,
            replayed=replayed,
            resent=down.resent,
            duplicates=up.duplicates,
            gaps=up.gaps,
            shared_bytes=None if exchange is None else exchange.sent,
        )
