"""Sharing of what they have learnt among the replicas of a module, over links of their own.

At a marker each replica sends its offer (:class:`~dni_runtime.core.replication.ReplicaMessage`) to
the first one as a batch, a word a sample, under the marker's id, and gets the answer as the
gradient of that batch. So offers and answers are encrypted, checked and sent again like all that
modules send.

A replica that is restarted sends the offer of a marker again. If the answer is lost to it for good
(DRAINED), it goes on with its own weights until the next marker.

For use by one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dni_runtime.core.replication import ReplicaMessage, SharedWeights, Sync
from dni_runtime.errors import WireError
from dni_runtime.link import Batch, Gradient, InputLink, LinkCounters, Marker, OutputLink
from dni_runtime.spec import EdgeSpec, TensorSpec, WorkerSpec
from dni_runtime.wire import Mark, Mode

log = logging.getLogger(__name__)

_WORD = TensorSpec(shape=(), dtype="int32")
_NO_LABEL = TensorSpec(shape=(0,), dtype="uint8")
_WINDOW = 4
_RETAINED = 2  # offers that are acknowledged, for a first replica that is restarted


def exchange_spec(spec: WorkerSpec, words: int) -> WorkerSpec:
    """Return a replica's spec for its links with the others; the longest message has ``words``."""
    edges = [
        EdgeSpec(
            source=lane.source,
            target=lane.target,
            number=lane.number,
            tensor=_WORD,
            gradients=1,
            awaited=True,
            resend=1,
            messages=True,
        )
        for lane in spec.peers
        if spec.backend is None
    ]
    unchanged = {"dtype": None, "gradient_dtype": None, "window": _WINDOW}
    return spec.model_copy(
        update={
            "sources": tuple(edge for edge in edges if edge.target == spec.module),
            "targets": tuple(edge for edge in edges if edge.source == spec.module),
            "output": _WORD,
            "outputs": (),
            "label": _NO_LABEL,
            "batch_limit": max(words, 1),
            "links": spec.links.model_copy(update=unchanged),
            "retain": _RETAINED,
        }
    )


def sync_at(marker: Marker) -> Sync:
    return Sync(marker.id, full=marker.mark != Mark.SYNC)


class Exchange:
    """The links of one replica with the others."""

    def __init__(
        self,
        shared: SharedWeights,
        *,
        inputs: list[InputLink],  # the first replica's, from the others
        done: int,  # markers up to this id are behind the replica
        gone: Callable[[str], bool],  # whether another replica has finished and sends nothing more
        restarted: bool = False,  # this replica alone
    ) -> None:
        self.inputs = inputs
        # another replica's link to the first one; None for the first
        self.output: OutputLink | None = None
        self.sent = 0  # bytes of all offers and answers
        self._shared = shared
        self._offers: list[dict[int, ReplicaMessage | None]] = [{} for _ in inputs]
        self._done = done
        self._gone = gone
        self._at: Sync | None = None
        # Whether the first replica may not have the weights that this one took last.
        self._unlike = restarted

    @property
    def links(self) -> tuple[InputLink | OutputLink, ...]:
        return (*self.inputs, *(() if self.output is None else (self.output,)))

    @property
    def counters(self) -> LinkCounters:
        return LinkCounters.total([link.counters for link in self.links])

    def greet(self) -> None:
        """Answer handshakes, without waiting, on links that have no peer."""
        for link in self.inputs:
            link.greet()

    def listen(self) -> None:
        """Read all that has come; it must not wait in a socket, or each poll would end at once."""
        self.done()

    def begin(self, marker: Marker) -> None:
        """Begin to share at a marker; :meth:`done` says when that is over."""
        self._at = sync_at(marker)
        if self.output is not None and self.output.drained < marker.id and self.output.room:
            self._send(self.output, marker, self._shared.offer(self._at, whole=self._unlike))

    def _send(self, output: OutputLink, marker: Marker, offer: ReplicaMessage) -> None:
        words = self._counted(offer)
        label = words.new_empty((len(words), 0), dtype=torch.uint8)
        output.send_batch(Batch(marker.id, marker.epoch, Mode.TRAIN, (), label), words)

    def done(self) -> bool:
        """Read what has come, and send what is due; return whether the sharing is over."""
        over = self._received() if self.output is not None else self._gathered()
        if over and self._at is not None:
            self._done, self._at = self._at.id, None
        return over

    def _received(self) -> bool:
        assert self.output is not None
        at, over = self._at, False
        for event in self.output.receive():
            if over:  # the answer may come twice, and a difference is to be added once
                continue
            if isinstance(event, Gradient) and at is not None and event.id == at.id:
                answer = self._read(self.output, event.g)
                self._unlike = answer is None or not self._shared.take(answer)
                over = True
        if at is not None and not over and self.output.drained >= at.id:
            log.warning("the replicas' answer at %d is lost: going on without it", at.id)
            self._unlike = over = True
        return over

    def _gathered(self) -> bool:
        for link, offers in zip(self.inputs, self._offers, strict=True):
            while (item := link.receive()) is not None:
                if isinstance(item, Batch) and item.id > self._done:
                    offers[item.id] = self._read(link, item.xs[0])
                else:
                    link.ack(item.id)
                    link.send_drained(self._done)
        at = self._at
        if at is None or not self._all_sent(at):
            return False
        current = {
            link: offers.get(at.id) for link, offers in zip(self.inputs, self._offers, strict=True)
        }
        for offers in self._offers:
            for id in [id for id in offers if id <= at.id]:
                del offers[id]
        read = {link: offer for link, offer in current.items() if offer is not None}
        for link, answer in self._shared.agree(at, read).items():
            link.send_gradient(at.id, self._counted(answer), ack=at.id)
        for link in self.inputs:
            link.send_drained(at.id)
        return True

    def _all_sent(self, at: Sync) -> bool:
        """Whether all other replicas have sent an offer, or never will."""
        return all(link.received >= at.id or self._gone(link.source) for link in self.inputs)

    def _read(self, link: InputLink | OutputLink, words: Tensor) -> ReplicaMessage | None:
        """Return the message of some words; None, and counted, if there is none in them."""
        try:
            return self._shared.read(words)
        except WireError as error:
            link.refuse(error)
            return None

    def _counted(self, message: ReplicaMessage) -> Tensor:
        words = message.words()
        self.sent += words.nbytes
        return words

    def finish(self, deadline_s: float) -> None:
        """Wait until the others have what was sent last."""
        end_s = time.monotonic() + deadline_s
        if self.output is not None:
            self.output.finish(deadline_s)
        for link in self.inputs:
            link.finish(max(end_s - time.monotonic(), 0.0))

    def close(self) -> None:
        for link in self.links:
            link.close()


class Pushes(Exchange):
    """The links of one replica with the others, for a strategy that does not wait.

    At a marker a replica sends its push, and trains on; the first replica adds each push to its
    weights when it comes, and answers with them. There is at most one push under way of each
    replica. Only before an evaluation, a checkpoint or the end all wait: the first one until all
    have pushed, the others for its answer.
    """

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
        # After a restart of this one others may wait at a later point.
        for link in [link for link, id in self._waiting.items() if id <= at.id]:
            self._answer(link, self._waiting.pop(link))
        for link in self.inputs:
            link.send_drained(at.id)
        self._done, self._at = at.id, None

    def _answer(self, link: InputLink, id: int) -> None:
        link.send_gradient(id, self._counted(ReplicaMessage(self._shared.row())), ack=id)
        link.send_drained(id)
