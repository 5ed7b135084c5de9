"""What a module does that was told to stop: it asks for a checkpoint, and leaves at it."""

from __future__ import annotations

import logging

from dni_runtime.link import InputLink
from dni_runtime.wire import Mark
from dni_runtime.worker.head import Head
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.signals import StopRequest

log = logging.getLogger(__name__)

REQUEST_AFTER_S = 1.0
"""A module told to stop asks for a checkpoint only when the head has not made one by itself."""

ASK_AGAIN_S = 5.0
"""It asks again after so long: the request may have been lost with a module that died."""


class Shutdown:
    """A module's way out.

    Args:
        stop: Tells that the worker should stop.
        metrics: Shows that it is about to.
        head: The head's end of the stream; None for other modules.
        input: The link from upstream; None for the head.

    Attributes:
        asked: Whether the module has asked for a checkpoint to leave at.
    """

    def __init__(
        self,
        stop: StopRequest,
        metrics: MetricsWriter,
        *,
        head: Head | None,
        input: InputLink | None,
    ) -> None:
        self.asked = False
        self._stop = stop
        self._metrics = metrics
        self._head = head
        self._input = input
        self._ask_again_s = 0.0

    def heed(self) -> bool:
        """Do what a module has to that was told to stop; call it again until it has left.

        Returns:
            Whether its patience is over: it leaves without a checkpoint.
        """
        self._stop.drain()
        if self._metrics.state == "running":
            log.info("told to stop: leaving at the next checkpoint")
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
            "no checkpoint marker within %.0f s: leaving without one (the last stays)", grace_s
        )
        return True

    def at(self, mark: Mark) -> bool:
        """Whether the module leaves at this marker, which is no STOP.

        When all modules are told to stop, a checkpoint that was on its way before is not where
        they meet: some have passed it already.
        """
        wanted = Mark.CHECKPOINT in mark and (self._stop.alone or Mark.ASKED in mark)
        return self.asked and wanted

    def _ask(self, input: InputLink) -> None:
        age_s = self._stop.age_s
        first_s = 0.0 if self._stop.alone else REQUEST_AFTER_S
        if age_s > (self._ask_again_s if self.asked else first_s):
            self.asked = True
            self._ask_again_s = age_s + ASK_AGAIN_S
            input.request("checkpoint")
