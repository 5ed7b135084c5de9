"""Finding the window of a link by measuring: pure state, no sockets and no clock.

The method is TCP Vegas' (Brakmo and Peterson 1995, doi:10.1109/49.464716): of the messages in
flight, ``window * (1 - base / round trip)`` wait in a queue, where the base is the round trip
without a queue. The window grows while fewer than one wait, and shrinks while more than two do. The
base is measured periodically with one message in flight, as BBR does (Cardwell et al. 2016, ACM
Queue 14:5).
"""

from __future__ import annotations

PROBES = 3
"""Measured round trips; the base is the shortest of them."""

PROBE_EVERY_S = 30.0

FEWEST_WAITING, MOST_WAITING = 1.0, 2.0


class WindowTuner:
    """Choice of how many messages may be in flight.

    Args:
        limit: Maximum size of the window.

    Attributes:
        size: Size of the window.
        limit: Maximum size of the window.
    """

    def __init__(self, limit: int) -> None:
        self.size = 1
        self.limit = limit
        self._sent: dict[int, tuple[float, bool]] = {}
        self._base_s: float | None = None
        self._probes: list[float] | None = []
        self._before_probe = 2
        self._probe_at_s = 0.0
        self._doubles = True
        self._round_ends = 0
        self._trips: list[float] = []
        self._full = False

    def sent(self, id: int, now_s: float, in_flight: int) -> None:
        """Note that a training batch has been sent.

        Args:
            id: Its position in the stream.
            now_s: The time.
            in_flight: Messages in flight, including this one.
        """
        self._sent[id] = now_s, in_flight == 1
        self._full |= in_flight >= self.size

    def acknowledged(self, id: int, now_s: float) -> None:
        """Note that everything up to ``id`` has been acknowledged."""
        done = [one for one in self._sent if one <= id]
        for one in done:
            sent_s, alone = self._sent.pop(one)
            if one == id:  # others may have been acknowledged late
                self._measured(one, now_s - sent_s, alone, now_s)

    def _measured(self, id: int, trip_s: float, alone: bool, now_s: float) -> None:
        if self._probes is not None:
            if alone:
                self._probes.append(trip_s)
            if len(self._probes) == PROBES:
                self._base_s = min(self._probes)
                self._probes = None
                self._probe_at_s = now_s + PROBE_EVERY_S
                self.size = self._before_probe
                self._begin_round()
            return
        self._trips.append(trip_s)
        if id < self._round_ends:
            return
        self._adjust()
        if now_s >= self._probe_at_s:
            self._probes, self._before_probe, self.size = [], self.size, 1
        self._begin_round()

    def _begin_round(self) -> None:
        self._round_ends = max(self._sent, default=0)
        self._trips, self._full = [], False

    def _adjust(self) -> None:
        assert self._base_s is not None
        trip_s = sum(self._trips) / len(self._trips)
        self._base_s = min(self._base_s, *self._trips)
        waiting = self.size * (1 - self._base_s / max(trip_s, 1e-9))
        self._doubles &= waiting < FEWEST_WAITING
        if waiting > MOST_WAITING:
            self.size = max(self.size - 1, 2)
        elif waiting < FEWEST_WAITING and self._full:
            self.size = min(self.size * 2 if self._doubles else self.size + 1, self.limit)
