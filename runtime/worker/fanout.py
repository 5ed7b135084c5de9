"""A module's links to downstream: one output for several modules.

For use by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dni_runtime.core.sums import GradientSum
from dni_runtime.link import Batch, Drain, Event, Gradient, LinkCounters, OutputLink
from dni_runtime.wire import Mark


class Fanout:
    """All links to downstream of one worker.

    A batch goes to each module that takes the output: by the only link to it, or by the link to
    that replica of it which gets the batch: as its id says, or, of lanes that are chosen, the one
    with the fewest unanswered batches. Markers go by all. The gradient of a batch is the sum
    of the modules'; if one of them will send none, there is none.
    """

    def __init__(self, outputs: Sequence[Sequence[OutputLink]]) -> None:
        self.links = tuple(link for links in outputs for link in links)
        self._outputs = tuple(outputs)
        self._teaching = [links for links in outputs if links[0].teaches]
        self._sums = GradientSum(len(self._teaching), outputs[0][0].outputs)
        self._drained = 0

    @property
    def counters(self) -> LinkCounters:
        return LinkCounters.total([link.counters for link in self.links])

    @property
    def fullest(self) -> OutputLink:
        """The link with the least room."""
        if len(self.links) == 1:
            return self.links[0]
        return min(self.links, key=lambda link: link.window - link.in_flight)

    @property
    def room(self) -> bool:
        """Whether there is room for another batch or marker wherever it goes."""
        return all(
            (any if links[0].chosen else all)(link.room for link in links)
            for links in self._outputs
        )

    def room_without_lost(self) -> bool:
        """Whether all windows of links that are not lost have room."""
        return all(link.room or link.lost for link in self.links)

    @property
    def lost(self) -> bool:
        """Whether a neighbour is gone: its connection has ended and was not replaced."""
        return any(link.lost for link in self.links)

    @property
    def connected(self) -> bool:
        """Whether a batch can go wherever it goes."""
        return all(
            (any if links[0].chosen else all)(link.connected for link in links)
            for links in self._outputs
        )

    @property
    def drained(self) -> int:
        """Id up to which no more gradients will come, as some module downstream has lost them."""
        return max(map(self._drained_of, self._teaching))

    def _drained_of(self, links: Sequence[OutputLink]) -> int:
        """Return the id up to which no more gradients will come from one of the modules."""
        return min(link.drained for link in links)

    @property
    def first(self) -> int:
        """The lowest id that can still be sent to a restarted neighbour."""
        return min(link.first for link in self.links)

    def unanswered(self, after: int) -> int:
        """Return the lowest id that may have to be sent again; ``after`` is behind all.

        A replica that does not respond while others do may lack earlier ones: they stay in the
        window of the lane to it.
        """
        links = [link for links in self._outputs for link in _responding(links)]
        return min((link.first for link in links if link.in_flight), default=after)

    def send_batch(self, batch: Batch, h: Tensor) -> None:
        """Send a batch's activation (on the CPU) where it goes; see :meth:`OutputLink.send_batch`.

        A link whose window has no room is told that the batch is left out.
        """
        for link in self._of(batch.id):
            if link.room:
                link.send_batch(batch, h)
            else:
                link.miss(batch.id, batch.epoch)

    def miss(self, batch: Batch) -> None:
        """Leave a batch out, and say so."""
        for link in self._of(batch.id):
            link.miss(batch.id, batch.epoch)

    def _of(self, id: int) -> list[OutputLink]:
        return [
            link
            for links in self._outputs
            for link in ([_least_busy(links, id)] if links[0].chosen else links)
            if link.chosen or link.carries(id)
        ]

    def send_mark(self, id: int, epoch: int, mark: Mark) -> None:
        """Send a marker; see :meth:`OutputLink.send_mark`."""
        missed = mark == Mark.MISSED  # it stands for a batch
        for link in self._of(id) if missed else self.links:
            link.send_mark(id, epoch, mark)

    def receive(self) -> list[Event]:
        """Return what has come from downstream; see :meth:`OutputLink.receive`."""
        if len(self.links) == 1:
            return self.links[0].receive()
        come = [[event for link in links for event in link.receive()] for links in self._teaching]
        events: list[Event] = [
            event
            for link in self.links
            if not link.teaches
            for event in link.receive()
            if not isinstance(event, Drain)
        ]
        incomplete: set[int] = set()
        for place, some in enumerate(come):  # all gradients before any DRAINED
            for event in some:
                if isinstance(event, Gradient):
                    takes = self._teaching[place][0].takes
                    total = self._sums.add(event.id, place, event.g, takes)
                    incomplete.add(event.id)
                    if total is not None:
                        events.append(Gradient(event.id, total))
                elif not isinstance(event, Drain):
                    events.append(event)
        if incomplete or any(isinstance(event, Drain) for some in come for event in some):
            events += self._given_up()
        return events

    def _given_up(self) -> list[Event]:
        """Return up to which ids no gradients will be complete any more."""
        drained = [self._drained_of(links) for links in self._teaching]
        lost = [self._sums.lacks(place, until) for place, until in enumerate(drained)]
        until = max(min(drained), *(id or 0 for id in lost))
        if until <= self._drained:
            return []
        self._drained = until
        return [Drain(until)]

    def close(self) -> None:
        for link in self.links:
            link.close()


def _responding(links: Sequence[OutputLink]) -> Sequence[OutputLink]:
    """Return those lanes of replicas that respond; all, if none does."""
    return [link for link in links if link.responds] or links if len(links) > 1 else links


def _least_busy(links: Sequence[OutputLink], id: int) -> OutputLink:
    """Return the lane with the fewest unanswered batches; then the one that waits longest.

    After a restart of this worker, a replica which had later batches would not take this one. If
    all had later ones, one of them has this one, too: each got its own in order.
    """
    takes = [link for link in links if link.received < id] or links
    return min(_responding(takes), key=lambda link: (not link.room, link.in_flight, link.last))
