"""The head's end of the stream: it numbers items, and records what it may have to resend."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

from dni_runtime.core.forward import as_inputs
from dni_runtime.documents.requests import Replicas, Requested
from dni_runtime.link import Batch, Marker
from dni_runtime.spec.members import as_body
from dni_runtime.wire import Body, Mark
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.stream import NOTHING, Item, Position, Stream

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two looks at which replicas are to take batches."""


class Head:
    """Supplies the head's batches and markers, as the link from upstream does for other modules.

    Args:
        stream: The items, from the start's position on.
        start: Where the head starts.
        ledger: What it has processed in the whole run.
        metrics: Gets the time spent waiting for data.
        output: The links to downstream; None in a chain of one module.

    Attributes:
        position: The stream's position after the newest item.
    """

    def __init__(
        self,
        stream: Iterator[Item],
        *,
        start: Start,
        ledger: Ledger,
        metrics: MetricsWriter,
        output: Fanout | None,
    ) -> None:
        self.position = start.position
        self._role = role = metrics.spec.head
        self._takes = (0,) if role is None else role.takes
        self._stream = stream
        self._start = start
        # An earlier attempt may also have used the id after the last one that it counted.
        self._progress = ledger.progress
        self._used = ledger.progress.counts.id + start.again
        self._metrics = metrics
        self._output = output
        self._next_id = start.first_id
        self._wanted = NOTHING
        self._ends_early = False
        self._before: deque[tuple[int, Position]] = deque()
        self._members = start.members
        self._look_at_s = 0.0

    def end_early(self) -> None:
        """End training as soon as possible."""
        self._ends_early = True

    def want(self, mark: Mark) -> None:
        """Put a marker into the stream as soon as possible."""
        self._wanted |= mark

    def next(self) -> Batch | Marker:
        """Return the next item, numbered.

        Raises:
            DataError: The data cannot be read.
        """
        id = self._next_id
        self._next_id += 1
        self._remember(id)
        mark = self._start.marks.get(id)
        body: dict[str, Body] = self._start.bodies.get(id, {})
        # An id that an earlier attempt may have used keeps its meaning.
        between = self.position.part == 0  # no marker goes between the parts of a batch
        new = id > self._used
        if mark is None and between and new:
            body = self._change() if Mark.STOP not in self._wanted else {}
            if self._wanted or body:
                mark, self._wanted = self._wanted, NOTHING
                if self._role is not None:
                    mark |= self.position.sync(self._role)
                mark |= Mark.SCALE | Mark.CHECKPOINT | Mark.SYNC if body else NOTHING
                mark = self._noted(id, mark, body)
        if mark is not None:
            return Marker(id, self._progress.epoch, mark, body)
        if self._ends_early and between and new and self.position.phase == "train":
            self._ends_early = False
            self._start.ends_at = id
            self._noted(id, NOTHING, {})
        if id == self._start.ends_at and isinstance(self._stream, Stream):
            self._stream.end()
        self._metrics.now("data")
        began = time.monotonic()
        item = next(self._stream)
        self._metrics.waiting_s["data"] += time.monotonic() - began
        self.position = item.position
        if item.x is None or item.y_BY is None:
            return Marker(id, item.epoch, item.mark, {})
        data = as_inputs(item.x)
        xs = tuple(data[one] for one in self._takes)
        return Batch(id, item.epoch, item.mode, xs, item.y_BY, item.part, data, item.rows)

    def _change(self) -> dict[str, Body]:
        """Return the body of a SCALE marker, if other replicas are to take batches."""
        now, now_s = self._members.now, time.monotonic()
        if not now or now_s < self._look_at_s:
            return {}
        self._look_at_s = now_s + LOOK_S
        found = Replicas.peek(self._metrics.run.replicas)
        if found is None or found.active == now:
            return {}
        return {"before": as_body(now), "after": as_body(found.active)}

    def _noted(self, id: int, mark: Mark, body: dict[str, Body]) -> Mark | None:
        """Record a request for a restarted head; return what may be sent of its marker."""
        try:
            Requested(id=id, mark=int(mark), body=body).append(self._metrics.run.marks)
        except OSError as error:  # a full disk: no reason to stop training
            log.warning("a restarted head will not do at %d what was requested: %s", id, error)
            if body:  # nobody could tell where later batches have gone
                body.clear()
                return mark & ~Mark.SCALE or None
        return mark

    def oldest(self) -> tuple[int, Position] | None:
        """Return the oldest id that may have to be resent, and the position before it."""
        self._forget()
        return self._before[0] if self._before else None

    def _remember(self, id: int) -> None:
        self._before.append((id, self.position))
        self._forget()

    def _forget(self) -> None:
        first = self._next_id if self._output is None else self._output.first
        while self._before and self._before[0][0] < first:
            self._before.popleft()
