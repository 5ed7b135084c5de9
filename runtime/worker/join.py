"""A module's links from upstream, joined batch by batch: one stream from several.

For use by one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from dni_runtime.link import Batch, InputLink, LinkCounters, Marker
from dni_runtime.wire import Mark


class Join:
    """All links from upstream of one worker.

    Each input is one link, or several from the replicas of a module, of which each batch comes on
    one. A batch is complete when it has come for all inputs, and a marker when it has come on all
    links. Both are returned by growing id. A batch that one input has lost is left out, and becomes
    a marker that says so: another join further down must not wait for it either.
    """

    def __init__(self, inputs: Sequence[Sequence[InputLink]]) -> None:
        self._inputs = tuple(inputs)
        self.links = tuple(link for links in inputs for link in links)
        self._queues: list[deque[Batch | Marker]] = [deque() for _ in self.links]
        self._passed = 0
        self._last = 0
        self._left_out = 0

    def streams(self) -> list[Join]:
        """Return a join of its own for each lane of an input; this one is not used any more."""
        queues = dict(zip(self.links, self._queues, strict=True))
        joins = [Join([[link] for link in links]) for links in zip(*self._inputs, strict=True)]
        for join in joins:
            join._queues = [queues[link] for link in join.links]
            join._passed = join._last = self._passed
        return joins

    @property
    def received(self) -> int:
        """The highest id up to which some input has accepted all that it can still get."""
        return max(min(link.received for link in links if link.connected) for links in self._inputs)

    def of(self, id: int) -> list[InputLink]:
        """Return the links that a batch comes on, in the order of the module's inputs."""
        return [next(link for link in links if link.carries(id)) for links in self._inputs]

    @property
    def counters(self) -> LinkCounters:
        total = LinkCounters.total([link.counters for link in self.links])
        total.gaps += self._left_out
        return total

    def start_after(self, id: int) -> None:
        """Leave out everything up to ``id``, which some link cannot bring any more."""
        self._passed = self._last = id

    def greet(self) -> None:
        """Answer handshakes, without waiting, on links that have no peer."""
        for link in self.links:
            link.greet()

    def listen(self) -> None:
        """Read all that has come, and keep it: no more than the links' windows.

        So a restarted module upstream is answered while nothing can be processed. In a graph it may
        wait for this module, this one for room downstream, and downstream for that module.
        """
        for link, queue in zip(self.links, self._queues, strict=True):
            while (item := link.receive()) is not None:
                queue.append(item)

    def receive(self) -> Batch | Marker | None:
        """Return the next batch or marker, without waiting; None if it is not complete."""
        if len(self.links) == 1:
            (queue,), (link,) = self._queues, self.links
            while (item := queue.popleft() if queue else link.receive()) is not None:
                if item.id > self._passed:
                    self._last = item.id
                    return _joined([item]) if isinstance(item, Batch) and item.data else item
                _pass_over(link, item.id)
            return None
        self.listen()  # a message left in a socket would end each poll at once
        while fronts := [queue[0].id for queue in self._queues if queue]:
            id = min(fronts)
            on = [n for n, queue in enumerate(self._queues) if queue and queue[0].id == id]
            first = self._queues[on[0]][0]
            if id > self._passed and not self._settled(id, _is_marker(first)):
                return None
            items = [self._queues[place].popleft() for place in on]
            if id <= self._passed:
                for place in on:
                    _pass_over(self.links[place], id)
                continue
            self._last = id
            batches = [item for item in items if isinstance(item, Batch)]
            if len(batches) == len(self._inputs):
                return _joined(batches)
            if _is_marker(first):
                return first
            self._left_out += bool(batches)
            return Marker(id, first.epoch, Mark.MISSED)
        return None

    def _settled(self, id: int, marker: bool) -> bool:
        """Whether no link can bring this id, or one before it, any more."""
        after = max(self._passed, self._last)
        return all(
            queue or not (marker or link.may_bring(after, id))
            for link, queue in zip(self.links, self._queues, strict=True)
        )

    def ack(self, id: int) -> None:
        """Acknowledge everything up to ``id``: it has been processed."""
        for link in self.links:
            link.ack(min(id, link.received))

    def send_drained(self, id: int, *, awaited: bool = False) -> None:
        """Announce that no gradient of a batch before ``id`` will follow.

        With ``awaited`` only modules upstream that wait for gradients are told.
        """
        for link in self.links:
            if link.awaited or not awaited:
                link.send_drained(id)

    def request(self, what: str) -> None:
        """Ask the head for something; all ways lead there."""
        connected = (link for link in self.links if link.connected)
        next(connected, self.links[0]).request(what)

    def reaches_peers(self) -> bool:
        """Return whether all modules upstream are connected now."""
        return all([link.reaches_peer() for link in self.links])

    def finish(self, deadline_s: float) -> None:
        """Wait until all modules upstream have received the last acknowledgements."""
        end_s, pending = time.monotonic() + deadline_s, list(self.links)
        slice_s = deadline_s / 10 if len(pending) > 1 else deadline_s
        while pending := [
            link for link in pending if not link.finish(slice_s)
        ]:  # each gets its turn
            if time.monotonic() >= end_s:
                return

    def close(self) -> None:
        for link in self.links:
            link.close()


def _pass_over(link: InputLink, id: int) -> None:
    """Answer what is left out."""
    link.ack(id)
    if link.awaited:
        link.send_drained(id)


def _is_marker(item: Batch | Marker) -> TypeGuard[Marker]:
    return isinstance(item, Marker) and Mark.MISSED not in item.mark


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return the batch with all inputs, those of the data last."""
    xs = [x for batch in batches for x in batch.xs]
    xs += [x for batch in batches for x in batch.data]
    return replace(batches[0], xs=tuple(xs), data=())
