"""The front of a chain that predicts: batches of requests in, answers out, over links like others.

It is the first and the last worker of the chain, in a thread of the process that serves it. No
more batches are on their way than there are modules: what comes meanwhile is the next batch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
import zmq
from torch import Tensor

from dni_runtime.errors import StoppedError, WorkerError
from dni_runtime.link import Batch, Marker
from dni_runtime.run.rundir import RunDir
from dni_runtime.serving.collect import OpenBatches, Part
from dni_runtime.serving.engine import Answer
from dni_runtime.serving.protocol import Signature
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Mode
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.farewell import POLL_MS
from dni_runtime.worker.join import Join
from dni_runtime.worker.links import Attempt, WorkerLinks
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.options import keyring
from dni_runtime.worker.predictor import WHOLE
from dni_runtime.worker.resume import Start
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import OWN, WorkerStart

log = logging.getLogger(__name__)

_ACK_EVERY, _ACK_S = 16, 0.1
"""Answers are acknowledged so many at a time, or after so long: each time wakes all modules."""


class Front:
    """An engine (``serving/engine.py``): the workers of a chain, by its links.

    A batch waits in the windows of the links until it is answered, so a module that is restarted
    gets again what it had. A front that is restarted while the modules go on (``--resume own``)
    does not know the batches of the one before: its own have higher positions, by the clock.
    """

    def __init__(
        self,
        run: RunDir,
        spec: WorkerSpec,
        start: WorkerStart,
        signature: Signature,
        *,
        depth: int,  # batches on their way: one for each module
        exit_wait_s: float,  # until an exit answers for the chain's output
    ) -> None:
        self.signature = signature
        self.answered: Callable[[Answer], None] = lambda answer: None
        self.failure: BaseException | None = None
        self._depth = depth
        self._stop = StopRequest()
        self._metrics = MetricsWriter(run, spec, start.attempt)
        self._keys = keyring(start, run, spec.module)
        attempt = Attempt(start, spec, run, self._metrics, self._stop, self._keys)
        restarted = start.resume == OWN
        self._position = self._former = int(time.time()) << 20 if restarted else 0
        self._links = WorkerLinks(attempt, Start(restarted=restarted, first_id=self._position + 1))
        self._waiting: deque[tuple[int, tuple[Tensor, ...], bool]] = deque()
        *exits, _ = (edge.source for edge in spec.sources)
        self._open = OpenBatches(exits, exit_wait_s)
        self._exits = [n for n, edge in enumerate(spec.sources) for _ in edge.links]  # of links
        self._last = [0] * len(self._exits)  # position of the last message of each link
        self._acked = [*self._last]
        self._ack_at_s = 0.0
        self._ack_every = max(min(_ACK_EVERY, spec.links.window - depth), 1)  # the window has room
        self._thread = threading.Thread(target=self._live, name="front", daemon=True)
        self._thread.start()

    def room(self) -> int:
        """How many more batches it takes now."""
        pending = len(self._open) + len(self._waiting)
        return max(self._depth - pending, 0) if self.failure is None else 0

    def submit(self, id: int, inputs: tuple[Tensor, ...], *, whole: bool = False) -> None:
        """Have a batch answered; ``inputs`` are on the CPU and must not change meanwhile."""
        self._waiting.append((id, inputs, whole))
        self._stop.wake()

    def close(self) -> None:
        """Have the thread end, and close the links; see :meth:`join`."""
        self._stop.stop()

    def join(self) -> None:
        """Wait until it has."""
        self._thread.join()

    def _live(self) -> None:
        metrics, links = self._metrics, self._links
        try:
            with metrics.report.regularly():
                metrics.set_state("connecting")
                links.listen()
                if links.meet():
                    metrics.set_state("running")
                    metrics.started()
                    self._serve()
                metrics.set_state("stopped")
        except BaseException as error:
            self.failure = error
            if not isinstance(error, StoppedError):
                log.exception("the front has failed")
            with contextlib.suppress(Exception):
                metrics.set_state("failed", error)
        finally:
            links.close()
            self._keys.leave()
            self._stop.close()
            gone = WorkerError("the chain was stopped")
            for id in (*self._open.ids, *(id for id, *_ in self._waiting)):
                self.answered(Answer(id, error=gone))

    def _serve(self) -> None:
        input, output = self._links.input, self._links.output
        assert input is not None
        assert output is not None
        poller = zmq.Poller()
        for socket in (self._stop.wakeup, *(link.socket for link in (*input.links, *output.links))):
            poller.register(socket, zmq.POLLIN)
        while not self._stop():
            self._stop.drain()
            for below in output.links:
                self._links.neighbours.look(below)
            output.receive()
            now_s = time.monotonic()
            while output.room and (lost := self._open.lost(now_s)):
                log.warning("a batch is sent again: later ones have been answered")
                self._send(output, *lost)
            while self._waiting and output.room:
                self._send(output, *self._waiting.popleft())
            for index, link in enumerate(input.links):  # of exits, then of the chain's output
                number = self._exits[index]
                while (item := link.receive()) is not None:
                    # One MISSED stands for several; or another lane brings them.
                    known = max(self._last[index], self._former)
                    for missed in range(item.id if link.chosen else known + 1, item.id):
                        self._answer(self._open.came(missed, number, None, now_s))
                    self._last[index] = item.id
                    self._answer(self._open.came(item.id, number, _part(item), now_s))
            self._answer(self._open.late(now_s))
            wait_s = min(self._open.wait_s(now_s), self._acknowledge(input, now_s))
            self._metrics.now("input" if self._open else "data")
            poller.poll(int(min(POLL_MS, 1000 * wait_s)))

    def _acknowledge(self, input: Join, now_s: float) -> float:
        """Acknowledge answers if it is time; return the seconds until it is."""
        due = now_s >= self._ack_at_s
        for index, link in enumerate(input.links):
            pending = self._last[index] - self._acked[index]
            # By what is not acknowledged yet, senders choose among replicas.
            if pending and (due or link.chosen or pending >= self._ack_every):
                self._acked[index], self._ack_at_s = self._last[index], now_s + _ACK_S
                link.ack(self._last[index])
        return _ACK_S if self._acked != self._last else float("inf")

    def _send(self, output: Fanout, id: int, inputs: tuple[Tensor, ...], whole: bool) -> None:
        self._position += 1
        self._open.sent(self._position, id, time.monotonic(), inputs, whole=whole)
        h = torch.empty(len(inputs[0]), 0)
        epoch = WHOLE if whole else 0
        output.send_batch(Batch(self._position, epoch, Mode.PREDICT, (), h, data=inputs), h)

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.answered(answer)


def _part(item: Batch | Marker) -> Part | None:
    """Return what a link's message says of a batch."""
    if isinstance(item, Marker):
        return None
    return Part(item.xs, item.data[0].bool() if item.data else None)
