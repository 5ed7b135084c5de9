"""What both ends of a link have: a socket of their own, counters, and waiting with a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dni_runtime.errors import StoppedError
from dni_runtime.link import sockets
from dni_runtime.link.contract import End, LinkContract
from dni_runtime.link.counters import LinkCounters, Refusals
from dni_runtime.spec import EdgeSpec, WorkerSpec
from dni_runtime.spec.edge import CHOSEN
from dni_runtime.spec.worker import ADJACENT_FAILURES

log = logging.getLogger(__name__)

MESSAGES_PER_CALL = 64
"""Messages that are read before something else gets its turn."""

_POLL_S = 0.2


class LinkEnd:
    """One end of a link, for use by one thread."""

    def __init__(self, spec: WorkerSpec, edge: EdgeSpec, end: End) -> None:
        self._contract = LinkContract.of(spec, edge)
        self._neighbour = edge.source if end == "input" else edge.target
        self.carries = edge.carries  # whether the batch with an id comes this way
        self.number = edge.number  # among the chain's links
        self.routed = bool(edge.route)  # some batches come another way
        self.chosen = edge.route == CHOSEN  # which ones, their sender chooses
        self.counters = LinkCounters()
        self.refuse = Refusals(self.counters, str(self._contract), log)
        self._context = sockets.open_context()
        make = sockets.input_socket if end == "input" else sockets.output_socket
        self._socket = make(
            self._context,
            window=spec.links.window * (1 + ADJACENT_FAILURES),  # with retained messages
            frame_limit=self._contract.frame_limit(end),
        )
        if ":" in (spec.links.interface or ""):  # as in a Kubernetes of IPv6 alone
            sockets.allow_ipv6(self._socket)

    @property
    def socket(self) -> sockets.Socket:
        """The socket, for ``zmq.Poller``: readable when ``receive`` has something to do."""
        return self._socket

    @property
    def _slow_hint(self) -> str:
        """What to do about a neighbour that has not answered in time."""
        return (
            f"see 'dnictl logs {self._neighbour}'; if it starts slowly, raise "
            "'links.connect_timeout_s'"
        )

    def close(self) -> None:
        """Close the socket; wait at most a second for what is to be sent."""
        sockets.close(self._socket, self._context)

    def _wait_until(
        self,
        done: Callable[[], bool],
        deadline_s: float,
        stop: Callable[[], bool] | None = None,
    ) -> bool:
        """Wait until ``done``; return whether that was before the deadline.

        ``done``, then ``stop``, are asked a few times a second and whenever something has come; if
        ``stop`` returns True, ``StoppedError`` is raised.
        """
        end_s = time.monotonic() + deadline_s
        while not done():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            if stop is not None and stop():
                raise StoppedError(f"stopped while waiting for module {self._neighbour!r}")
            sockets.wait(self._socket, min(left_s, _POLL_S))
        return True
