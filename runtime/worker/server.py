"""The module server's loop: take the next item, train, send, and learn from what comes late.

The loop runs in the process's main thread and is the only one that computes. It never waits for
I/O while there is something to compute: sockets are read and written by ZeroMQ's own thread,
checkpoints by theirs. It sleeps in one poll when the input is empty, the link's window is full, or
its gradient interface waits for the true gradient.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from enum import Enum

import zmq
from torch import Tensor

from dni_runtime.core.evaluation import Evaluation
from dni_runtime.core.step import ModuleStep
from dni_runtime.link import Batch, Drained, Gradient, InputLink, Marker, OutputLink
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker.checkpoint import CheckpointWriter, snapshot
from dni_runtime.worker.metrics import LinkFigures, Meter
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.stream import Item, Position

log = logging.getLogger(__name__)

POLL_MS = 500
"""Longest sleep: metrics and the state file are refreshed in between."""

REQUEST_AFTER_S = 1.0
"""A module told to stop asks for a checkpoint only when the head has not made one by itself."""

FAREWELL_S = 5.0
"""Longest wait for the module upstream to hear that all has been processed."""


class Outcome(Enum):
    """How serving ended."""

    FINISHED = "finished"
    STOPPED = "stopped"


class ModuleServer:
    """Serves one module.

    Args:
        step: The module.
        meter: Where measurements go.
        checkpoints: Where checkpoints go.
        stop: Tells that the worker should stop.
        stream: The head's stream from its position on; None for other modules.
        input: The link from upstream; None for the head.
        output: The link to downstream; None for the tail.
        first_id: The id of the next item in the stream.
        position: The head's position before the first item.
    """

    def __init__(
        self,
        step: ModuleStep,
        *,
        meter: Meter,
        checkpoints: CheckpointWriter,
        stop: StopRequest,
        stream: Iterator[Item] | None = None,
        input: InputLink | None = None,
        output: OutputLink | None = None,
        first_id: int = 1,
        position: Position | None = None,
    ) -> None:
        self._step = step
        self._meter = meter
        self._checkpoints = checkpoints
        self._stop = stop
        self._stream = stream
        self._input = input
        self._output = output
        self._next_id = first_id
        self._position = position
        self._evaluation: Evaluation | None = None
        self._wanted = Mark(0)
        self._asked = False
        self._draining: Marker | None = None
        self._outcome: Outcome | None = None
        self._chain_ends = False
        # Input that cannot be taken yet must not wake the loop up again and again.
        self._any_poller, self._output_poller = zmq.Poller(), zmq.Poller()
        for poller in (self._any_poller, self._output_poller):
            poller.register(stop.wakeup, zmq.POLLIN)
            if output is not None:
                poller.register(output.socket, zmq.POLLIN)
        if input is not None:
            self._any_poller.register(input.socket, zmq.POLLIN)

    def serve(self) -> Outcome:
        """Run until the stream ends or the worker is told to stop.

        Raises:
            HandshakeError: A neighbour turned out to be of another chain.
            DataError: The head's data cannot be read.
        """
        while self._outcome is None:
            self._collect()
            if self._stop():
                self._heed_stop()
            elif self._meter.due(self._step):
                self._write_metrics()
            if self._outcome is not None or not self._may_take() or not self._take():
                self._sleep()
        self._write_metrics()
        self._part()
        return self._outcome

    def _part(self) -> None:
        """Leave when both neighbours know what they have to, or are gone."""
        left_s = max(self._step.spec.stop_grace_s - self._stop.age_s, 0.1)
        if self._output is not None and not self._output.finish(left_s):
            log.warning("the module downstream has not acknowledged everything")
        if self._input is not None and self._chain_ends:
            self._input.finish(min(left_s, FAREWELL_S))

    def _may_take(self) -> bool:
        room = self._output is None or self._output.room
        return room and self._draining is None and not self._step.blocked

    def _take(self) -> bool:
        """Handle the next item, if there is one."""
        if self._input is not None:
            received = self._input.receive()
            if received is None:
                return False
            if isinstance(received, Marker):
                self._handle_marker(received)
            else:
                self._handle_batch(received, None)
            return True
        id = self._next_id
        self._next_id += 1
        if self._wanted:
            assert self._position is not None
            mark, self._wanted = self._wanted, Mark(0)
            self._handle_marker(Marker(id, self._meter.progress.epoch, mark, {}))
            return True
        assert self._stream is not None
        began = time.monotonic()
        item = next(self._stream)
        self._meter.waiting_s["data"] += time.monotonic() - began
        if item.x_BX is None or item.y_BY is None:
            self._position = item.position
            self._handle_marker(Marker(id, item.epoch, item.mark, {}))
        else:
            self._handle_batch(Batch(id, item.epoch, item.mode, item.x_BX, item.y_BY), item)
        return True

    def _handle_batch(self, batch: Batch, item: Item | None) -> None:
        step, progress = self._step, self._meter.progress
        device = step.device
        x_BX = batch.h.to(device, non_blocking=True)
        y_BY = batch.y.to(device, non_blocking=True)
        if batch.mode is Mode.TRAIN:
            h_BH = step.forward(batch.id, x_BX)
            self._send_on(batch, h_BH)
            g_BX = step.update(y_BY)
            progress.step += 1
            progress.samples += len(x_BX)
            self._meter.count_loss(step.counters.loss)
        else:
            h_BH = step.evaluate(x_BX)
            self._send_on(batch, h_BH)
            g_BX = None
            p_BP = step.predict(h_BH)
            if p_BP is not None:
                if self._evaluation is None:
                    self._evaluation = Evaluation.of(step)
                self._evaluation.add(p_BP, y_BY)
        if item is not None:
            self._position = item.position
        progress.id, progress.epoch = batch.id, batch.epoch
        self._answer(batch.id, g_BX)

    def _send_on(self, batch: Batch, h_BH: Tensor) -> None:
        if self._output is not None:
            h_BH = h_BH.to("cpu")
            self._output.send_batch(batch.id, batch.epoch, batch.mode, h_BH, batch.y)
            self._meter.count_window(self._output.in_flight)

    def _answer(self, id: int, g_BX: Tensor | None) -> None:
        """Acknowledge up to ``id``, with the gradient for upstream where there is one."""
        if self._input is None:
            return
        if g_BX is None:
            self._input.ack(id)
        else:
            self._input.send_gradient(id, g_BX.to("cpu"), ack=id)

    def _collect(self) -> None:
        """Take what has come from downstream: gradients, and requests for the head."""
        if self._output is None:
            return
        for event in self._output.receive():
            if isinstance(event, Gradient):
                g_BH = event.g.to(self._step.device, non_blocking=True)
                g_BX = self._step.late_gradient(event.id, g_BH)
                if g_BX is not None and self._input is not None:
                    self._input.send_gradient(event.id, g_BX.to("cpu"), ack=self._acked)
            elif isinstance(event, Drained):
                if self._draining is not None and event.id >= self._draining.id:
                    self._step.give_up_waiting()
                    marker, self._draining = self._draining, None
                    self._finish_marker(marker)
            else:
                self._ask_upstream()

    @property
    def _acked(self) -> int:
        return self._meter.progress.id

    def _ask_upstream(self) -> None:
        """Somebody wants a checkpoint: the head puts a marker into the stream."""
        if self._input is None:
            self._wanted |= Mark.CHECKPOINT
        else:
            self._input.request("checkpoint")

    def _handle_marker(self, marker: Marker) -> None:
        if self._output is not None:
            self._output.send_mark(marker.id, marker.epoch, marker.mark, marker.body)
        if self._step.waiting:
            # The update of batches before the marker still waits for true gradients.
            self._draining = marker
        else:
            self._finish_marker(marker)

    def _finish_marker(self, marker: Marker) -> None:
        progress = self._meter.progress
        progress.id, progress.epoch = marker.id, max(marker.epoch, progress.epoch)
        if Mark.EPOCH in marker.mark:
            self._step.end_epoch()
        if Mark.EVAL in marker.mark and self._evaluation is not None:
            result, samples = self._evaluation.result(), self._evaluation.samples
            self._evaluation = None
            self._meter.evaluated(result, samples)
            log.info(
                "epoch %d%s: %s",
                marker.epoch,
                ", early head" if self._step.spec.tail is None else "",
                ", ".join(f"{k} {v:.4f}" for k, v in result.items()),
            )
        if Mark.CHECKPOINT in marker.mark:
            self._checkpoint(marker.id)
        if self._input is not None:
            self._input.send_drained(marker.id)
            self._input.ack(marker.id)
        self._chain_ends = bool(marker.mark & (Mark.END | Mark.STOP))
        if Mark.END in marker.mark:
            self._outcome = Outcome.FINISHED
        elif Mark.STOP in marker.mark or (self._asked and Mark.CHECKPOINT in marker.mark):
            # Whoever has not asked waits a moment: when all are told to stop, STOP comes.
            self._outcome = Outcome.STOPPED

    def _checkpoint(self, cut: int) -> None:
        tensors, document = snapshot(self._step)
        progress = self._meter.progress
        document |= {"epoch": progress.epoch, "step": progress.step, "samples": progress.samples}
        if self._position is not None:
            document["position"] = self._position.to_dict()
        self._checkpoints.write(cut, tensors, document)

    def _heed_stop(self) -> None:
        self._stop.drain()
        if self._meter.state == "running":
            log.info("told to stop: leaving at the next checkpoint")
            self._meter.set_state("stopping")
            if self._input is None:
                self._wanted |= Mark.CHECKPOINT | Mark.STOP
        if self._input is not None and not self._asked and self._stop.age_s > REQUEST_AFTER_S:
            self._asked = True
            self._input.request("checkpoint")
        if self._stop.age_s > self._step.spec.stop_grace_s:
            log.warning(
                "no checkpoint marker within %.0f s: leaving without one (the last stays)",
                self._step.spec.stop_grace_s,
            )
            self._outcome = Outcome.STOPPED

    def _write_metrics(self) -> None:
        input, output = self._input, self._output
        links = LinkFigures(
            window=None if output is None else self._step.spec.links.window,
            in_flight=0 if output is None else output.in_flight,
            gradients_dropped=0 if input is None else input.counters.gradients_dropped,
            refused={} if input is None else dict(input.counters.refused),
        )
        self._meter.write(self._step, links)

    def _sleep(self) -> None:
        if self._outcome is not None:
            return
        began = time.monotonic()
        if self._may_take():
            reason, poller = "input", self._any_poller
        else:
            full = self._output is not None and not self._output.room
            reason, poller = "window" if full else "gradient", self._output_poller
        poller.poll(POLL_MS)
        self._meter.waiting_s[reason] += time.monotonic() - began
