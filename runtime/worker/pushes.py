"""Sharing without waiting: a parameter server among the replicas of a module.

At a marker a replica sends its push, and trains on; the first replica adds each push to its weights
when it comes, and answers with them. There is at most one push under way of each replica. Only
before an evaluation, a checkpoint or the end all wait: the first one until all have pushed, the
others for its answer.

For use by one thread.
"""

from __future__ import annotations

import logging
from typing import Any

from dni_runtime.core.replication import ReplicaMessage
from dni_runtime.link import Batch, Gradient, InputLink, Marker, OutputLink
from dni_runtime.worker.exchange import Exchange, sync_at

log = logging.getLogger(__name__)


class Pushes(Exchange):
    """The links of one replica with the others, for a strategy that does not wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pushed: int | None = None
        self._waiting: dict[InputLink, int] = {}

    def begin(self, marker: Marker) -> None:
        sync = sync_at(marker)
        self._at = sync if sync.full else None
        output = self.output
        if output is None:
            self._shared.apply_own()
            return
        if not output.room or not (sync.full or self._pushed is None):
            return
        offer = self._shared.offer(sync)
        if output.drained < marker.id:  # else a former process has pushed it
            self._send(output, marker, offer)
            self._pushed = marker.id

    def done(self) -> bool:
        if self.output is not None:
            self._pull(self.output)
        else:
            self._serve()
        return self._at is None

    def _pull(self, output: OutputLink) -> None:
        for event in output.receive():
            if isinstance(event, Gradient) and event.id == self._pushed:
                answer = self._read(output, event.g)
                if answer is not None:
                    self._shared.take(answer)
                self._over(event.id)
        until = output.drained
        if self._pushed is not None and until >= self._pushed:
            log.warning("the answer to the push at %d is lost: going on without it", self._pushed)
            self._over(self._pushed)
        if self._at is not None and until >= self._at.id:
            self._over(self._at.id)

    def _over(self, id: int) -> None:
        self._pushed = None
        if self._at is not None and id >= self._at.id:
            self._done, self._at = self._at.id, None

    def _serve(self) -> None:
        for number, link in enumerate(self.inputs):
            while (item := link.receive()) is not None:
                offer = self._read(link, item.xs[0]) if isinstance(item, Batch) else None
                if offer is not None:
                    self._shared.apply(offer, number, item.id)
                if offer is not None and offer.waits and item.id > self._done:
                    self._waiting[link] = item.id
                else:
                    self._answer(link, item.id)
        at = self._at
        if at is None or not self._all_sent(at):
            return
        for link, id in self._waiting.items():
            self._answer(link, id)
        for link in self.inputs:
            link.send_drained(at.id)
        self._waiting.clear()
        self._done, self._at = at.id, None

    def _answer(self, link: InputLink, id: int) -> None:
        link.send_gradient(id, self._counted(ReplicaMessage(self._shared.row())), ack=id)
        link.send_drained(id)
