"""Both ends' idea of the stream: pure state, no sockets (docs/wire.md, "Window")."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dni_runtime.wire import Buffer

JUMP_LIMIT = 1 << 20
"""A restarted module may leave a gap in the stream; a larger one is a broken message."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that is kept until it is acknowledged, or longer for a neighbour that restarts.

    Attributes:
        id: Its position in the stream.
        frames: Its frames; they keep the tensors' memory alive.
    """

    id: int
    frames: Sequence[Buffer]


class SendWindow:
    """Messages that are not acknowledged yet, and which of them the connection has already had.

    Args:
        size: How many there may be.
        next_id: The first id that will be added.
        retain: Acknowledged messages that are kept all the same: a neighbour that restarts has lost
            what it had sent on and its own neighbour had not got yet.

    Attributes:
        size: How many there may be.
        last: The highest id that was added, or the one before the first.
        acked: Everything up to this id is acknowledged.
        received: Everything up to this id has reached the other end.
    """

    def __init__(self, size: int, *, next_id: int = 1, retain: int = 0) -> None:
        self.size = size
        self.retain = retain
        self.last = next_id - 1
        self.acked = 0
        self.received = 0
        self._kept: deque[Sent] = deque()
        self._retained = 0  # of the kept ones, counted from the oldest
        self._transmitted = 0  # of the kept ones, counted from the oldest
        self._high = 0  # the highest id that was ever transmitted

    def __len__(self) -> int:
        return len(self._kept) - self._retained

    @property
    def room(self) -> bool:
        """Whether another message may be added."""
        return len(self) < self.size

    @property
    def first(self) -> int:
        """The lowest id that can still be sent."""
        return self._kept[0].id if self._kept else self.last + 1

    def add(self, id: int, frames: Sequence[Buffer], *, force: bool = False) -> None:
        """Keep a message; :meth:`pending` gives it out.

        Args:
            id: Its position in the stream; grows.
            frames: Its frames.
            force: Whether it goes in where there is no room, too.

        Raises:
            ValueError: The id does not grow, or there is no room (a bug of the caller).
        """
        if id <= self.last:
            raise ValueError(f"id {id} after {self.last}")
        if not (self.room or force):
            raise ValueError(f"id {id} does not fit: {self.size} messages are unacknowledged")
        self.last = id
        self._kept.append(Sent(id, frames))
        self._settle()

    def pending(self) -> Sent | None:
        """The next message to transmit, or None.

        What was forced into a full window waits for acknowledgements of what came before.
        """
        while self._transmitted < len(self._kept):
            sent = self._kept[self._transmitted]
            if sent.id > self.received:
                return sent if self._transmitted - self._retained < self.size else None
            self._transmitted += 1
        return None

    def advance(self) -> bool:
        """What :meth:`pending` gave has been transmitted; returns whether it was before, too."""
        id = self._kept[self._transmitted].id
        self._transmitted += 1
        again = id <= self._high
        self._high = max(self._high, id)
        return again

    def acknowledge(self, id: int) -> bool:
        """Forget everything up to ``id``.

        Returns:
            False, with nothing changed, where the other end cannot have processed ``id``.
        """
        if id > max(self.last, self.received):
            return False
        self.acked = max(self.acked, id)
        self._settle()
        return True

    def rewind(self, received: int) -> None:
        """A new connection: what lies above ``received`` has to be transmitted (again)."""
        self.received = received
        self._transmitted = 0

    def _settle(self) -> None:
        """Count what is acknowledged, and forget what is no longer retained."""
        while self._retained < len(self._kept) and self._kept[self._retained].id <= self.acked:
            self._retained += 1
        while self._retained > self.retain:
            self._kept.popleft()
            self._retained -= 1
            self._transmitted = max(0, self._transmitted - 1)


class ReceiveOrder:
    """Which messages of the stream have been accepted, and which have been processed.

    Args:
        received: Everything up to this id was accepted and processed before.

    Attributes:
        received: The highest id that was accepted.
        acked: Everything up to this id has been processed.
        gaps: Ids that never came.
    """

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self.acked = received
        self.gaps = 0

    def accept(self, id: int) -> bool:
        """Whether a message is new; it then counts as accepted."""
        if id <= self.received:
            return False
        self.gaps += id - self.received - 1
        self.received = id
        return True

    def acknowledge(self, id: int) -> None:
        """Everything up to ``id`` has been processed.

        Raises:
            ValueError: It has not been accepted (a bug of the caller).
        """
        if id > self.received:
            raise ValueError(f"id {id} is acknowledged, but {self.received} is the last that came")
        self.acked = max(self.acked, id)

    def start_at(self, first: int) -> int:
        """A restarted module takes all that the other end can still send, and has partly had.

        Returns:
            How many ids are lost, as :meth:`skip_to`.
        """
        if first <= self.received:
            self.received = self.acked = first - 1
        return self.skip_to(first)

    def skip_to(self, first: int) -> int:
        """The other end cannot send anything below ``first`` any more.

        Returns:
            How many ids are lost thereby.
        """
        lost = max(0, first - 1 - self.received)
        if lost:
            self.gaps += lost
            self.received = self.acked = first - 1
        return lost
