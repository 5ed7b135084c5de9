"""A module's links to downstream: one output for several modules.

For use by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from dni_runtime.core.sums import GradientSum
from dni_runtime.link import Batch, Drained, Event, Gradient, LinkCounters, OutputLink
from dni_runtime.spec import EdgeSpec
from dni_runtime.spec.members import Members
from dni_runtime.wire import ID_LIMIT, Body, Mark


class Fanout:
    """All links to downstream of one worker.

    A batch goes to each module that takes the output: by the only link to it, or by the link to
    that replica of it which gets the batch. Markers go by all. The gradient of a batch is the sum
    of the modules'; if one of them will send none, there is none.

    Links to replicas that join are opened at the marker from which on they take batches, and those
    to replicas that have left are closed when nothing can be sent to them any more.
    """

    def __init__(
        self,
        outputs: Sequence[Sequence[OutputLink]],  # to each of those modules
        *,
        members: Members | None = None,
        lanes: Sequence[Sequence[EdgeSpec]] = (),  # all links that there may be to each of them
        # opens one, for ids from the given one on
        dial: Callable[[EdgeSpec, int], OutputLink] | None = None,
    ) -> None:
        self._outputs = [list(own) for own in outputs]
        self._members = members or Members({})
        self._lanes = lanes
        self._dial = dial
        self.links = self._all()  # those that are open
        teaches = [own[0].tensor is not None for own in lanes]
        teaches = teaches or [own[0].teaches for own in outputs]
        both = zip(self._outputs, teaches, strict=True)
        self._teaching = [own for own, teaching in both if teaching]
        self._sums = GradientSum(len(self._teaching))
        self._drained = 0
        self._left: dict[
            str, int | None
        ] = {}  # at which marker the neighbour of a closed link left

    def _all(self) -> tuple[OutputLink, ...]:
        return tuple(link for own in self._outputs for link in own)

    def _scale(self, id: int) -> None:
        """Open the links to the replicas that join at a marker."""
        assert self._dial is not None
        for own, lanes in zip(self._outputs, self._lanes, strict=True):
            for lane in lanes:
                there = [link for link in own if link.target == lane.target]
                if there and self._members.joined(lane.target) == id:
                    there[0].close()  # of its time before it left
                    own.remove(there.pop())
                left = self._left.get(lane.target) == id  # it needs nothing of this marker
                if self._members.passes(lane, id) and not there and not left:
                    own.append(self._dial(lane, id))
        self.links = self._all()
        self._drained = min(self._drained, self.drained)  # new links will say so again

    def _close_left(self) -> None:
        """Close the links to replicas that have left."""
        left = {
            link
            for link in self.links
            if link.dismissed and self._members.leaves(link.target) is not None
        }
        for link in left:
            self._left[link.target] = self._members.leaves(link.target)
            link.close()
        for own in self._outputs if left else ():
            own[:] = [link for link in own if link not in left]
            self.links = self._all()

    @property
    def counters(self) -> LinkCounters:
        """Counters of all links together."""
        return LinkCounters.total([link.counters for link in self.links])

    @property
    def fullest(self) -> OutputLink:
        """The link with the least room."""
        if len(self.links) == 1:
            return self.links[0]
        return min(self.links, key=lambda link: link.window - link.in_flight)

    @property
    def room(self) -> bool:
        """Whether all windows have room for another batch or marker."""
        return all(link.room for link in self.links)

    def room_or_alone(self) -> bool:
        """Whether all windows of links that are not lost have room."""
        return all(link.room or link.lost for link in self.links)

    @property
    def lost(self) -> bool:
        """Whether a neighbour is gone: its connection has ended and was not replaced."""
        return any(link.lost for link in self.links)

    @property
    def connected(self) -> bool:
        """Whether all links are open."""
        return all(link.connected for link in self.links)

    @property
    def drained(self) -> int:
        """Id up to which no more gradients will come, as some module downstream has lost them."""
        return max(map(self._drained_of, self._teaching))

    def _drained_of(self, own: Sequence[OutputLink]) -> int:
        """Return the id up to which no more gradients will come from one of the modules."""
        found = [link.drained for link in own]
        if self._members.now:
            left = [self._members.leaves(link.target) for link in own]
            both = zip(found, left, strict=True)  # one that has left gets no later marker
            found = [id for id, at in both if at is None or id < at]
        return min(found, default=ID_LIMIT if own else 0)

    @property
    def first(self) -> int:
        """The lowest id that can still be sent to a restarted neighbour."""
        return min(link.first for link in self.links)

    def send_batch(self, batch: Batch, h: Tensor) -> None:
        """Send a batch's activation (on the CPU) where it goes; see :meth:`OutputLink.send_batch`.

        A link whose window has no room is told that the batch is left out.
        """
        for link in self._of(batch.id):
            if link.room:
                link.send_batch(
                    batch.id,
                    batch.epoch,
                    batch.mode,
                    h,
                    batch.y,
                    batch.part,
                    batch.data,
                    batch.rows,
                )
            else:
                link.miss(batch.id, batch.epoch)

    def miss(self, batch: Batch) -> None:
        """Leave a batch out, and say so."""
        for link in self._of(batch.id):
            link.miss(batch.id, batch.epoch)

    def _of(self, id: int) -> list[OutputLink]:
        return [link for link in self.links if link.carries(id)]

    def send_mark(
        self, id: int, epoch: int, mark: Mark, body: Mapping[str, Body] | None = None
    ) -> None:
        """Send a marker; see :meth:`OutputLink.send_mark`."""
        if Mark.SCALE in mark:
            self._scale(id)
        missed = mark == Mark.MISSED  # it stands for a batch
        for link in self._of(id) if missed else [one for one in self.links if one.passes(id)]:
            link.send_mark(id, epoch, mark, body)

    def receive(self) -> list[Event]:
        """Return what has come from downstream; see :meth:`OutputLink.receive`."""
        events = self._received()
        if self._members.now and any(link.dismissed for link in self.links):
            self._close_left()
        return events

    def _received(self) -> list[Event]:
        if len(self.links) == 1:
            return self.links[0].receive()
        come = [[event for link in own for event in link.receive()] for own in self._teaching]
        events: list[Event] = [
            event
            for link in self.links
            if not link.teaches
            for event in link.receive()
            if not isinstance(event, Drained)
        ]
        incomplete: set[int] = set()
        for place, some in enumerate(come):  # all gradients before any DRAINED
            for event in some:
                if isinstance(event, Gradient):
                    total = self._sums.add(event.id, place, event.g)
                    incomplete.add(event.id)
                    if total is not None:
                        events.append(Gradient(event.id, total))
                elif not isinstance(event, Drained):
                    events.append(event)
        if incomplete or any(isinstance(event, Drained) for some in come for event in some):
            events += self._given_up()
        return events

    def _given_up(self) -> list[Event]:
        """Return up to which ids no gradients will be complete any more."""
        drained = [self._drained_of(own) for own in self._teaching]
        lost = [self._sums.lacks(place, until) for place, until in enumerate(drained)]
        until = max(min(drained), *(id or 0 for id in lost))
        if until <= self._drained:
            return []
        self._drained = until
        return [Drained(until)]

    def close(self) -> None:
        """Close all links."""
        for link in self.links:
            link.close()
