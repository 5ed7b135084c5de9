"""Each end's state of the stream: pure state, no sockets (docs/wire.md, "Window")."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dni_runtime.wire import Buffer

JUMP_LIMIT = 1 << 20
"""Largest gap that a restarted module may leave; a larger one means a broken message."""


GAP_COUNTED = 1 << 12
"""Ids of a gap that are looked at one by one; of a longer one, which a HELLO may claim, a share."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message kept until it is acknowledged, or longer for a neighbour that restarts."""

    id: int
    frames: Sequence[Buffer]  # keep the tensors' memory alive
    missed: bool = False  # it only says that batches up to its id were left out


class SendWindow:
    """Unacknowledged messages, and which of them were transmitted on this connection."""

    def __init__(self, size: int, *, next_id: int = 1, retain: int = 0) -> None:
        self.size = size  # maximum number of unacknowledged messages
        # acknowledged messages kept nevertheless: a neighbour that restarts has lost those that it
        # had passed on but its own neighbour had not received
        self.retain = retain
        self.last = next_id - 1  # the highest id that was added, or the one before the first
        self.acked = 0  # everything up to this id is acknowledged
        self.received = 0  # everything up to this id has reached the other end
        self._kept: deque[SentMessage] = deque()
        self._retained = 0  # acknowledged ones at the start of _kept
        self._transmitted = 0  # transmitted ones at the start of _kept
        self._high = 0  # the highest id ever transmitted

    def __len__(self) -> int:
        return len(self._kept) - self._retained

    @property
    def room(self) -> bool:
        """Whether another message may be added."""
        return len(self._kept) - self._retained < self.size

    @property
    def first(self) -> int:
        """The lowest id that can still be sent."""
        return self._kept[0].id if self._kept else self.last + 1

    def add(
        self, id: int, frames: Sequence[Buffer], *, force: bool = False, missed: bool = False
    ) -> None:
        """Add a message, to be returned by :meth:`pending`; ids MUST grow.

        A full window takes it only with ``force``. ``missed``: it only says that batches were left
        out. If it follows another such message, which was never transmitted, it replaces that: a
        long outage takes no more memory.
        """
        if id <= self.last:
            raise ValueError(f"id {id} after {self.last}")
        if not (self.room or force):
            raise ValueError(f"id {id} does not fit: {self.size} messages are unacknowledged")
        self.last = id
        newest = self._kept[-1] if self._kept else None
        if missed and newest and newest.missed and newest.id > max(self._high, self.acked):
            self._kept.pop()
            self._transmitted = min(self._transmitted, len(self._kept))
        self._kept.append(SentMessage(id, frames, missed))
        self._settle()

    def pending(self) -> SentMessage | None:
        """Return the next message to transmit, or None.

        Messages forced into a full window wait until earlier ones are acknowledged.
        """
        while self._transmitted < len(self._kept):
            sent = self._kept[self._transmitted]
            if sent.id > self.received:
                return sent if self._transmitted - self._retained < self.size else None
            self._transmitted += 1
        return None

    def advance(self) -> bool:
        """Mark the message of :meth:`pending` as transmitted; return whether it was before."""
        id = self._kept[self._transmitted].id
        self._transmitted += 1
        again = id <= self._high
        self._high = max(self._high, id)
        return again

    def acknowledge(self, id: int) -> bool:
        """Forget all up to ``id``; return False if the other end cannot have processed it."""
        if id > max(self.last, self.received):
            return False
        self.acked = max(self.acked, id)
        self._settle()
        return True

    def rewind(self, received: int) -> None:
        """Transmit everything above ``received`` (again), on a new connection."""
        self.received = received
        self._transmitted = 0

    def _settle(self) -> None:
        """Count acknowledged messages, and drop those no longer retained."""
        while self._retained < len(self._kept) and self._kept[self._retained].id <= self.acked:
            self._retained += 1
        while self._retained > self.retain:
            self._kept.popleft()
            self._retained -= 1
            self._transmitted = max(0, self._transmitted - 1)


class ReceiveOrder:
    """Which messages of the stream were accepted, and which were processed."""

    def __init__(
        self,
        received: int = 0,
        carries: Callable[[int], bool] | None = None,
        *,
        jumps: bool = False,  # ids that do not come say nothing: they may belong to another lane
    ) -> None:
        self._carries = carries  # whether the batch with an id comes this way; None: all do
        self._jumps = jumps
        self.received = received  # the highest id that was accepted
        self.acked = received  # everything up to this id has been processed
        self.gaps = 0  # ids that never came

    def accept(self, id: int) -> bool:
        """Accept a message if it is new; return whether it is."""
        if id <= self.received:
            return False
        self.gaps += self._between(id)
        self.received = id
        return True

    def acknowledge(self, id: int) -> None:
        """Note that everything up to ``id``, which MUST have been accepted, has been processed."""
        if id > self.received:
            raise ValueError(f"id {id} is acknowledged, but {self.received} is the last that came")
        self.acked = max(self.acked, id)

    def start_at(self, first: int) -> int:
        """Accept all that the other end can still send, even again, after a restart.

        Returns the number of ids that are lost, as :meth:`skip_to`.
        """
        if first <= self.received:
            self.received = self.acked = first - 1
        return self.skip_to(first)

    def skip_to(self, first: int) -> int:
        """Skip to the lowest id that the other end can still send; return how many are lost."""
        lost = self._between(first)
        if first - 1 > self.received:
            self.gaps += lost
            self.received = self.acked = first - 1
        return lost

    def may_bring(self, after: int, until: int) -> bool:
        """Return whether a batch with an id above ``after``, up to ``until``, may come here."""
        between = range(max(after, self.received) + 1, until + 1)[:GAP_COUNTED]
        return bool(between) if self._carries is None else any(map(self._carries, between))

    def _between(self, id: int) -> int:
        """Return how many batches between the last message and ``id`` should have come."""
        between = range(self.received + 1, 0 if self._jumps else id)
        if self._carries is None:
            return len(between)
        count = sum(map(self._carries, between[:GAP_COUNTED]))
        return count * max(len(between), GAP_COUNTED) // GAP_COUNTED
