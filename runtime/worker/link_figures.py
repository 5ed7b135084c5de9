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
    """Counters of a worker's links.

    Attributes:
        window: Largest number of messages in flight downstream, on the fullest link; None for the
            tail.
        in_flight: Messages in flight there.
        connected: Whether the links downstream are connected; None for the tail.
        gradients_dropped: Gradients that could not be sent upstream.
        refused: Messages refused, by reason.
        missed: Batches not sent, because the module downstream was gone.
        replayed: Batches trained on again, because the module upstream was gone.
        resent: Messages resent to a restarted neighbour.
        duplicates: Messages that had already come.
        gaps: Ids that never came.
        shared_bytes: Bytes of what was sent to the module's other replicas; None if it has none.
    """

    window: int | None = None
    in_flight: int = 0
    connected: bool | None = None
    gradients_dropped: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    missed: int = 0
    replayed: int = 0
    resent: int = 0
    duplicates: int = 0
    gaps: int = 0
    shared_bytes: int | None = None

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
