"""The end of a worker: what its neighbours may still need of it before it exits."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import zmq

from dni_runtime.cuts import written_cuts
from dni_runtime.link import Marker
from dni_runtime.worker.exchange import Exchange
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.neighbours import Neighbours
from dni_runtime.worker.saver import StateSaver
from dni_runtime.worker.signals import StopRequest

log = logging.getLogger(__name__)

POLL_MS = 500
"""Longest sleep of a worker: metrics and the state file are refreshed in between."""

FLUSH_SLICE_S = 0.5
"""Seconds between checks of the neighbours while waiting for downstream's acknowledgements."""

FAREWELL_S = 5.0
"""Longest wait until the module upstream has received the last acknowledgement."""


class Farewell:
    """Takes leave of a worker's neighbours.

    Args:
        metrics: Writes the metrics.
        stop: The stop request.
        saver: Saves the module's state.
        ledger: Counts of what it has processed in the whole run.
        input: The links from upstream; None for the head.
        output: The links to downstream; None for the tail.
        exchange: The links to the module's other replicas; None if it has none.
        neighbours: Reconnects to modules downstream after their restart; None: they never restart.
        workers: Names of all workers of the chain.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        stop: StopRequest,
        *,
        saver: StateSaver,
        ledger: Ledger,
        input: Join | None,
        output: Fanout | None,
        exchange: Exchange | None,
        neighbours: Neighbours | None,
        workers: Sequence[str],
    ) -> None:
        self._metrics = metrics
        self._stop = stop
        self._saver = saver
        self._ledger = ledger
        self._input = input
        self._output = output
        self._exchange = exchange
        self._neighbours = neighbours
        self._workers = workers

    def part(self, last: Marker | None, poller: zmq.Poller, *, over: bool, parked: bool) -> None:
        """Flush the links downstream, then acknowledge the end of the stream.

        That comes last: until then modules upstream keep running, and can resend to a module that
        is restarted meanwhile.

        Args:
            last: The marker at which the module ends; None: it ends before one.
            poller: Wakes up if something comes on a link.
            over: Whether nothing is left for it to do, in this run or until it takes batches again.
            parked: Whether the others go on without it.
        """
        left_s = max(self._metrics.spec.stop_grace_s - self._stop.age_s, 0.1)
        self._metrics.now("window")
        if self._output is not None:
            self._flush(self._output, left_s, over=over)
        if self._exchange is not None:
            self._exchange.finish(min(left_s, FAREWELL_S))
        self._metrics.now("checkpoint")
        if last is not None:
            self._saver.flush()
            self._ledger.processed(last.id)
            if self._input is not None:
                self._input.ack(last.id)
                if parked:
                    self._linger(last.id, self._input, poller)
                else:
                    self._input.finish(min(left_s, FAREWELL_S))

    def _linger(self, id: int, input: Join, poller: zmq.Poller) -> None:
        """Stay until all modules have written a checkpoint behind the last marker.

        Until then a neighbour that is restarted may need again what has passed here.
        """
        look_at_s = 0.0
        while not self._stop():
            self._metrics.report.check()
            input.listen()
            for link in self._output.links if self._output is not None else ():
                link.receive()
                if self._neighbours is not None:
                    self._neighbours.look(link)
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + 2 * FLUSH_SLICE_S
                if any(cut >= id for cut in written_cuts(self._metrics.run, self._workers)):
                    return
            poller.poll(POLL_MS)

    def _flush(self, output: Fanout, left_s: float, *, over: bool) -> None:
        """Wait until downstream has acknowledged all; at the run's end, also for its restart."""
        end_s, left = time.monotonic() + left_s, list(output.links)
        slice_s = min(FLUSH_SLICE_S, left_s) / max(len(left), 1)
        while left := [link for link in left if not link.finish(slice_s)]:  # each gets its turn
            self._metrics.report.check()
            if self._neighbours is not None:
                for link in left:
                    self._neighbours.look(link)
                gone = [link.target for link in left if link.lost]
                if over and not self._stop() and all(map(self._neighbours.remains, gone)):
                    continue
            if time.monotonic() >= end_s:
                log.warning(
                    "not everything was acknowledged by %s", ", ".join(link.target for link in left)
                )
                return
