"""The end of a worker: when it stops, and what its neighbours may still need of it then."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from dni_runtime.link import Marker
from dni_runtime.wire import Mark
from dni_runtime.worker.checkpoint import CheckpointWriter
from dni_runtime.worker.exchange import Exchange
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.head import Head
from dni_runtime.worker.join import Join
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.neighbours import Neighbours
from dni_runtime.worker.signals import StopRequest

log = logging.getLogger(__name__)

REQUEST_AFTER_S = 1.0
"""Seconds in which the head may make the checkpoint without a request."""

ASK_AGAIN_S = 5.0
"""Seconds between requests, which may be lost with a module that died."""


class Shutdown:
    """A module's graceful shutdown."""

    def __init__(
        self,
        stop: StopRequest,
        metrics: MetricsWriter,
        *,
        head: Head | None,
        input: Join | None,
    ) -> None:
        self.asked = False  # the module has requested a checkpoint to stop at
        self._stop = stop
        self._metrics = metrics
        self._head = head
        self._input = input
        self._ask_again_s = 0.0

    def heed(self) -> bool:
        """Continue the shutdown; call it repeatedly until the module has stopped.

        Returns whether the grace period is over: the module stops without a checkpoint.
        """
        self._stop.drain()
        if self._metrics.state == "running":
            log.info("told to stop: exiting at the next checkpoint")
            self._metrics.set_state("stopping")
        if self._head is not None:
            self._head.want(Mark.CHECKPOINT if self._stop.alone else Mark.CHECKPOINT | Mark.STOP)
            self.asked |= self._stop.alone
        elif self._input is not None:
            self._ask(self._input)
        grace_s = self._metrics.spec.stop_grace_s
        if self._stop.age_s <= grace_s:
            return False
        log.warning(
            "no checkpoint marker within %.0f s: exiting without one (the last is kept)", grace_s
        )
        return True

    def at(self, mark: Mark) -> bool:
        """Whether the module stops at this marker, which is not a STOP.

        When all modules are told to stop, they do not stop at a checkpoint that was already on its
        way: some have passed it.
        """
        here = Mark.CHECKPOINT in mark and (self._stop.alone or Mark.ASKED in mark)
        return self.asked and here

    def _ask(self, input: Join) -> None:
        age_s = self._stop.age_s
        first_s = 0.0 if self._stop.alone else REQUEST_AFTER_S
        if age_s > (self._ask_again_s if self.asked else first_s):
            self.asked = True
            self._ask_again_s = age_s + ASK_AGAIN_S
            input.request("checkpoint")


POLL_MS = 500
"""Longest sleep of a worker: metrics and the state file are refreshed in between."""

FLUSH_SLICE_S = 0.5
"""Seconds between checks of the neighbours while waiting for downstream's acknowledgements."""

FAREWELL_S = 5.0
"""Longest wait until the module upstream has received the last acknowledgement."""


@dataclass(frozen=True)
class Farewell:
    """Ends a worker's links as soon as its neighbours need nothing more of it."""

    metrics: MetricsWriter
    stop: StopRequest
    checkpoints: CheckpointWriter
    ledger: Ledger
    input: Join | None
    output: Fanout | None
    exchange: Exchange | None
    neighbours: Neighbours | None  # None: neighbours never restart

    def part(self, last: Marker | None, *, over: bool) -> None:
        """Flush the links downstream, then acknowledge the end of the stream.

        That comes last: until then modules upstream keep running, and can resend to a module that
        is restarted meanwhile. ``last`` is the marker at which the module ends; None: it ends
        before one. ``over``: nothing is left for it to do in this run.
        """
        left_s = max(self.metrics.spec.stop_grace_s - self.stop.age_s, 0.1)
        self.metrics.now("window")
        if self.output is not None:
            self._flush(self.output, left_s, over=over)
        if self.exchange is not None:
            self.exchange.finish(min(left_s, FAREWELL_S))
        self.metrics.now("checkpoint")
        if last is not None:
            self.checkpoints.flush()
            self.ledger.processed(last.id)
            if self.input is not None:
                self.input.ack(last.id)
                self.input.finish(min(left_s, FAREWELL_S))

    def _flush(self, output: Fanout, left_s: float, *, over: bool) -> None:
        """Wait until downstream has acknowledged all; at the run's end, also for its restart."""
        end_s, left = time.monotonic() + left_s, list(output.links)
        slice_s = min(FLUSH_SLICE_S, left_s) / max(len(left), 1)
        while left := [link for link in left if not link.finish(slice_s)]:  # each gets its turn
            self.metrics.report.check()
            if self.exchange is not None:
                self.exchange.greet()  # downstream may wait for a replica that still starts
            if self.neighbours is not None:
                for link in left:
                    self.neighbours.look(link)
                gone = [link.target for link in left if link.lost]
                if over and not self.stop() and all(map(self.neighbours.remains, gone)):
                    continue
            if time.monotonic() >= end_s:
                log.warning(
                    "not everything was acknowledged by %s", ", ".join(link.target for link in left)
                )
                return
