"""The end of a worker: when it stops."""

from __future__ import annotations

import logging

from dni_runtime.wire import Mark
from dni_runtime.worker.head import Head
from dni_runtime.worker.join import Join
from dni_runtime.worker.metrics import MetricsWriter
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
