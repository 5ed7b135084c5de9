"""Sharing of weights among the replicas of a module, over links of their own.

At a marker each replica sends its row (:class:`~dni_runtime.core.replication.Shared`) to the first
one as a batch of one sample, under the marker's id, and gets the mean as the gradient of that
batch. So rows and means are encrypted, checked and sent again like all that modules send.

A replica that is restarted sends the row of a marker again. If the mean is lost to it for good
(DRAINED), it goes on with its own weights until the next marker.

For use by one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dni_runtime.core.replication import Shared, mean_of
from dni_runtime.link import Batch, Gradient, InputLink, OutputLink
from dni_runtime.spec import EdgeSpec, TensorSpec, WorkerSpec
from dni_runtime.wire import Mode

log = logging.getLogger(__name__)

_LABEL = TensorSpec(shape=(), dtype="uint8")
_WINDOW = 4
_RETAINED = 2  # rows that are acknowledged, for a first replica that is restarted


def exchange_spec(spec: WorkerSpec, size: int) -> WorkerSpec:
    """Return a replica's spec for its links with the others.

    Args:
        spec: The replica.
        size: Numbers in a row.
    """
    row = TensorSpec(shape=(size,), dtype="float32")
    edges = [
        EdgeSpec(
            source=lane.source,
            target=lane.target,
            number=lane.number,
            tensor=row,
            gradients=1,
            awaited=True,
            resend=1,
        )
        for lane in spec.peers
    ]
    unchanged = {"dtype": None, "gradient_dtype": None, "window": _WINDOW}
    return spec.model_copy(
        update={
            "sources": tuple(edge for edge in edges if edge.target == spec.module),
            "targets": tuple(edge for edge in edges if edge.source == spec.module),
            "output": row,
            "outputs": (),
            "label": _LABEL,
            "batch_limit": 1,
            "links": spec.links.model_copy(update=unchanged),
            "retain": _RETAINED,
        }
    )


class Exchange:
    """The links of one replica with the others.

    Args:
        shared: What the replicas share.
        inputs: The first replica's links from the others.
        done: Markers up to this id are behind the replica.
        gone: Whether another replica has finished and will send nothing more.

    Attributes:
        output: Another replica's link to the first one, once there is one; None for the first.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        inputs: list[InputLink],
        done: int,
        gone: Callable[[str], bool],
    ) -> None:
        self.inputs = inputs
        self.output: OutputLink | None = None
        self._shared = shared
        self._rows: list[dict[int, Tensor]] = [{} for _ in inputs]
        self._done = done
        self._gone = gone
        self._at: int | None = None

    @property
    def links(self) -> tuple[InputLink | OutputLink, ...]:
        """All its links."""
        return (*self.inputs, *(() if self.output is None else (self.output,)))

    def greet(self) -> None:
        """Answer handshakes, without waiting, on links that have no peer."""
        for link in self.inputs:
            link.greet()

    def begin(self, id: int, epoch: int) -> None:
        """Begin to share at a marker; :meth:`done` says when that is over."""
        self._at = id
        if self.output is not None and self.output.drained < id and self.output.room:
            row = self._shared.row()[None]
            self.output.send_batch(id, epoch, Mode.TRAIN, row, torch.zeros(1, dtype=torch.uint8))

    def done(self) -> bool:
        """Read what has come, and send what is due; return whether the sharing is over."""
        over = self._received() if self.output is not None else self._gathered()
        if over and self._at is not None:
            self._done, self._at = self._at, None
        return over

    def _received(self) -> bool:
        assert self.output is not None
        at, over = self._at, False
        for event in self.output.receive():
            if isinstance(event, Gradient) and event.id == at:
                self._shared.agree(event.g[0])
                over = True
        if at is not None and not over and self.output.drained >= at:
            log.warning("the replicas' mean at %d is lost: going on without it", at)
            over = True
        return over

    def _gathered(self) -> bool:
        for link, rows in zip(self.inputs, self._rows, strict=True):
            while (item := link.receive()) is not None:
                if isinstance(item, Batch) and item.id > self._done:
                    rows[item.id] = item.xs[0][0]
                else:
                    link.ack(item.id)
                    link.send_drained(self._done)
        at = self._at
        if at is None:
            return False
        for link, rows in zip(self.inputs, self._rows, strict=True):
            if not (at in rows or link.received >= at or self._gone(link.source)):
                return False
        both = zip(self.inputs, self._rows, strict=True)
        sent = {link: rows[at] for link, rows in both if at in rows}
        for rows in self._rows:
            for id in [id for id in rows if id <= at]:
                del rows[id]
        mean = mean_of([self._shared.row(), *sent.values()])
        for link in sent:
            link.send_gradient(at, mean[None], ack=at)
        for link in self.inputs:
            link.send_drained(at)
        self._shared.agree(mean)
        return True

    def finish(self, deadline_s: float) -> None:
        """Wait until the others have what was sent last."""
        end_s = time.monotonic() + deadline_s
        if self.output is not None:
            self.output.finish(deadline_s)
        for link in self.inputs:
            link.finish(max(end_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Close all links."""
        for link in self.links:
            link.close()
