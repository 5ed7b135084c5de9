"""Both ends' idea of the stream: pure state, no sockets (docs/wire.md, "Window")."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dni_runtime.wire import Buffer


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that is kept until it is acknowledged.

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

    Attributes:
        size: How many there may be.
        last: The highest id that was added, or the one before the first.
        acked: Everything up to this id is acknowledged.
        received: Everything up to this id has reached the other end.
    """

    def __init__(self, size: int, *, next_id: int = 1) -> None:
        self.size = size
        self.last = next_id - 1
        self.acked = 0
        self.received = 0
        self._kept: deque[Sent] = deque()
        self._transmitted = 0  # of the kept ones, counted from the oldest
        self._high = 0  # the highest id that was ever transmitted

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def room(self) -> bool:
        """Whether another message may be added."""
        return len(self._kept) < self.size

    @property
    def first(self) -> int:
        """The lowest id that can still be sent."""
        return self._kept[0].id if self._kept else self.last + 1

    def add(self, id: int, frames: Sequence[Buffer]) -> None:
        """Keep a message; :meth:`pending` gives it out.

        Raises:
            ValueError: The id does not grow, or there is no room (a bug of the caller).
        """
        if id <= self.last:
            raise ValueError(f"id {id} after {self.last}")
        if not self.room:
            raise ValueError(f"id {id} does not fit: {self.size} messages are unacknowledged")
        self.last = id
        if id > self.acked:
            self._kept.append(Sent(id, frames))

    def pending(self) -> Sent | None:
        """The next message to transmit, or None."""
        while self._transmitted < len(self._kept):
            sent = self._kept[self._transmitted]
            if sent.id > self.received:
                return sent
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
        while self._kept and self._kept[0].id <= id:
            self._kept.popleft()
            self._transmitted = max(0, self._transmitted - 1)
        return True

    def rewind(self, received: int) -> None:
        """A new connection: what lies above ``received`` has to be transmitted (again)."""
        self.received = received
        self._transmitted = 0


class ReceiveOrder:
    """Which messages of the stream have been accepted, and which have been processed.

    Args:
        received: Everything up to this id was accepted and processed before.

    Attributes:
        received: The highest id that was accepted.
        acked: Everything up to this id has been processed.
        duplicates: Messages that were dropped because they had been accepted before.
        gaps: Ids that never came.
    """

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self.acked = received
        self.duplicates = 0
        self.gaps = 0

    def accept(self, id: int) -> bool:
        """Whether a message is new; it then counts as accepted."""
        if id <= self.received:
            self.duplicates += 1
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
