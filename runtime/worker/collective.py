"""Sharing among the replicas of a module by torch.distributed (``replication.backend``).

The process group's all-reduce computes the mean of what all offer, and each replica makes the
result of it by itself. There are no links; if a replica is lost, all workers begin again at the
newest cut (``plan/settings.py``).

For use by one thread; the group has another one, so that a wait does not stop the worker's loop.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from dni_runtime.core.replication import ReplicaMessage, SharedWeights
from dni_runtime.link import Marker
from dni_runtime.worker.exchange import Exchange, sync_at
from dni_runtime.worker.group import Group
from dni_runtime.worker.signals import StopRequest


class Collective(Exchange):
    """A replica's part in the sharing of a process group."""

    def __init__(self, shared: SharedWeights, group: Group, stop: StopRequest) -> None:
        super().__init__(shared, inputs=[], done=0, gone=lambda name: False)
        self._group, self._stop = group, stop
        self._thread = ThreadPoolExecutor(1, "replicas")
        self._formed = self._thread.submit(group.form)
        self._mean: Future[ReplicaMessage] | None = None

    def begin(self, marker: Marker) -> None:
        offer = self._shared.offer(sync_at(marker))
        self._mean = self._thread.submit(self._group.mean, offer)
        self._mean.add_done_callback(lambda _: self._stop.wake())

    def done(self) -> bool:
        if self._formed.done():
            self._formed.result()
        if self._mean is None or not self._mean.done():
            return False
        mean, self._mean = self._mean.result(), None
        self._stop.drain()
        self._shared.settle(mean)
        self.sent = self._group.sent
        return True

    def finish(self, deadline_s: float) -> None:
        self._group.part(deadline_s)

    def close(self) -> None:
        self._group.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
