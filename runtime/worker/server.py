"""The module server's loop: take the next item, train, send, and learn from what comes late.

The loop runs in the process's main thread and is the only one that computes. It never waits for
I/O while there is something to compute: sockets are read and written by ZeroMQ's own thread,
checkpoints by theirs. It sleeps in one poll when the input is empty, the link's window is full, or
its gradient interface waits for the true gradient.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

import zmq
from torch import Tensor

from dni_runtime.core.evaluation import Evaluation
from dni_runtime.core.step import ModuleStep
from dni_runtime.link import Batch, Drained, Gradient, InputLink, Marker, OutputLink
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker.checkpoint import CheckpointWriter, State, snapshot
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import LinkFigures, Meter
from dni_runtime.worker.neighbours import Neighbours
from dni_runtime.worker.replay import ReplayBuffer
from dni_runtime.worker.resume import Start, document, note_mark
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.stream import Item, Position

log = logging.getLogger(__name__)

POLL_MS = 500
"""Longest sleep: metrics and the state file are refreshed in between."""

REQUEST_AFTER_S = 1.0
"""A module told to stop asks for a checkpoint only when the head has not made one by itself."""

ASK_AGAIN_S = 5.0
"""It asks again after so long: the request may have been lost with a module that died."""

SNAPSHOT_SHARE = 0.02
"""Copying the module's state for snapshots takes at most this share of the time."""

SILENT_S = 0.5
"""An input that has been silent for so long may have lost its module."""

FLUSH_SLICE_S = 0.5
"""While it waits for downstream to have everything, a module looks around this often."""

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
        start: Where the module begins.
        ledger: What it has processed in the whole run.
        stream: The head's stream from its position on; None for other modules.
        input: The link from upstream; None for the head.
        output: The link to downstream; None for the tail.
        neighbours: Finds the module downstream again when it has been restarted; None: it stays.
    """

    def __init__(
        self,
        step: ModuleStep,
        *,
        meter: Meter,
        checkpoints: CheckpointWriter,
        stop: StopRequest,
        start: Start,
        ledger: Ledger,
        stream: Iterator[Item] | None = None,
        input: InputLink | None = None,
        output: OutputLink | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._step = step
        self._meter = meter
        self._checkpoints = checkpoints
        self._stop = stop
        self._stream = stream
        self._input = input
        self._output = output
        self._neighbours = neighbours if output is not None else None
        self._start = start
        self._ledger = ledger
        self._next_id = start.first_id
        self._position = start.position if input is None else None
        # The head: positions before all that it may have to send again.
        self._before: deque[tuple[int, Position]] = deque()
        self._evaluation: Evaluation | None = None
        if ledger.counts.evaluation is not None:
            self._evaluation = Evaluation.of(step)
            self._evaluation.go_on_from(ledger.counts.evaluation)
        self._wanted = Mark(0)
        self._asked_s: float | None = None
        self._told_all = False
        self._draining: Marker | None = None
        self._outcome: Outcome | None = None
        self._last: Marker | None = None
        self._snapshot_id = start.cut
        self._snapshot_due_s = time.monotonic() + step.spec.snapshot_s
        self._goes_on_alone = step.spec.links.on_loss == "continue"
        size = step.spec.links.replay if input is not None and step.replays else 0
        self._replay = ReplayBuffer(size, step.spec.seed) if size else None
        self._heard_s = time.monotonic()
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
                self._snapshot()
            if self._outcome is not None or not self._may_take() or not self._take():
                self._sleep()
        self._write_metrics()
        self._part()
        return self._outcome

    def _part(self) -> None:
        """Leave when both neighbours know what they have to, or are gone.

        The end of the stream is acknowledged last: until then the module upstream stays, so that
        whoever dies on the way finds it there.
        """
        left_s = max(self._step.spec.stop_grace_s - self._stop.age_s, 0.1)
        if self._output is not None and not self._flush(self._output, left_s):
            log.warning("the module downstream has not acknowledged everything")
        if self._last is not None:
            self._checkpoints.flush()
            self._ledger.processed(self._last.id)
            if self._input is not None:
                self._input.ack(self._last.id)
                self._input.finish(min(left_s, FAREWELL_S))

    def _flush(self, output: OutputLink, left_s: float) -> bool:
        """Wait until downstream has everything; at the end of the run also for its restart."""
        end_s = time.monotonic() + left_s
        downstream = self._step.spec.downstream
        while not output.finish(min(FLUSH_SLICE_S, left_s)):
            self._meter.keep_alive()
            if self._neighbours is not None and downstream is not None:
                self._neighbours.look(output)
                over = self._outcome is Outcome.FINISHED and not self._stop()
                if over and (not output.lost or self._neighbours.expected(downstream)):
                    continue
            if time.monotonic() >= end_s:
                return False
        return True

    def _may_take(self) -> bool:
        if self._draining is not None or self._step.blocked:
            return False
        return self._output is None or self._output.room or self._alone(self._output)

    def _alone(self, output: OutputLink) -> bool:
        """Whether training goes on without the module downstream."""
        return self._goes_on_alone and output.lost

    def _take(self) -> bool:
        """Handle the next item, if there is one."""
        if self._input is not None:
            received = self._input.receive()
            if received is None:
                return False
            if self._replay is not None:
                self._heard_s = time.monotonic()
            if isinstance(received, Marker):
                self._handle_marker(received)
            else:
                self._handle_batch(received, None)
            return True
        id = self._next_id
        self._next_id += 1
        assert self._position is not None
        self._remember(id, self._position)
        mark = self._start.marks.get(id)
        # An id that a former process may have used stands for what it stood for then.
        if mark is None and self._wanted and id > self._ledger.counts.id + self._start.again:
            mark, self._wanted = self._wanted, Mark(0)
            note_mark(self._meter.run, id, mark)
        if mark is not None:
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

    def _remember(self, id: int, position: Position) -> None:
        """Keep the positions of what a restarted head has to send again."""
        self._before.append((id, position))
        first = self._output.first if self._output is not None else id
        while len(self._before) > 1 and self._before[0][0] < first:
            self._before.popleft()

    def _handle_batch(self, batch: Batch, item: Item | None) -> None:
        step, progress, ledger = self._step, self._meter.progress, self._ledger
        device = step.device
        x_BX = batch.h.to(device, non_blocking=True)
        y_BY = batch.y.to(device, non_blocking=True)
        g_BX = None
        if batch.mode is not Mode.TRAIN:
            h_BH = step.evaluate(x_BX)
            self._send_on(batch, h_BH)
            if ledger.new(batch.id):
                self._evaluate(h_BH, y_BY)
            ledger.processed(batch.id)
        elif batch.id <= self._start.cut:  # only sent on: a restarted module was trained on it
            self._send_on(batch, step.forward_again(x_BX))
        else:
            self._end_epochs(batch.epoch - 1)
            h_BH = step.forward(batch.id, x_BX)
            self._send_on(batch, h_BH)
            g_BX = step.update(y_BY)
            ledger.trained(batch.id, batch.epoch, len(x_BX))
            progress.step, progress.samples = ledger.counts.step, ledger.counts.samples
            self._meter.count_loss(step.counters.loss)
            if self._replay is not None:
                self._replay.keep(x_BX, y_BY)
        if item is not None:
            self._position = item.position
        progress.id, progress.epoch = batch.id, batch.epoch
        self._answer(batch.id, g_BX)

    def _evaluate(self, h_BH: Tensor, y_BY: Tensor) -> None:
        p_BP = self._step.predict(h_BH)
        if p_BP is None:
            return
        if self._evaluation is None:
            self._evaluation = Evaluation.of(self._step)
        self._evaluation.add(p_BP, y_BY)
        self._ledger.counts.evaluation = self._evaluation.to_dict()

    def _end_epochs(self, epoch: int) -> None:
        """Step schedules to the end of an epoch, past markers that a former process has had."""
        while self._start.epochs_ended < epoch:
            self._start.epochs_ended += 1
            self._step.end_epoch()

    def _send_on(self, batch: Batch, h_BH: Tensor) -> None:
        output = self._output
        if output is None:
            return
        if not output.room:
            output.counters.missed += 1
            return
        output.send_batch(batch.id, batch.epoch, batch.mode, h_BH.to("cpu"), batch.y)
        self._meter.count_window(output.in_flight)

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
        if self._neighbours is not None:
            self._neighbours.look(self._output)
        if self._draining is not None and self._alone(self._output):
            self._give_up()
        for event in self._output.receive():
            if isinstance(event, Gradient):
                g_BH = event.g.to(self._step.device, non_blocking=True)
                g_BX = self._step.late_gradient(event.id, g_BH)
                if g_BX is not None and self._input is not None:
                    self._input.send_gradient(event.id, g_BX.to("cpu"), ack=self._acked)
            elif isinstance(event, Drained):
                if self._draining is not None and event.id >= self._draining.id:
                    self._give_up()
            else:
                self._ask_upstream()

    def _give_up(self) -> None:
        """No true gradient for a batch before the marker will come any more."""
        assert self._draining is not None
        self._step.give_up_waiting()
        marker, self._draining = self._draining, None
        self._finish_marker(marker)

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
        progress, mark = self._meter.progress, marker.mark
        progress.id, progress.epoch = marker.id, max(marker.epoch, progress.epoch)
        new = self._ledger.new(marker.id)
        if Mark.EPOCH in mark:
            self._end_epochs(marker.epoch)
            counts = self._ledger.counts
            if new and counts.epoch == marker.epoch:
                self._meter.epoch_ended(marker.epoch, counts.epoch_batches)
        if Mark.EVAL in mark and self._evaluation is not None:
            self._report_evaluation(marker.epoch)
        if Mark.CHECKPOINT in mark and marker.id > self._start.cut:
            state = self._state(marker.id, over=Mark.END in mark)
            self._checkpoints.write(marker.id, *state)
        if mark & (Mark.END | Mark.STOP):
            self._last = marker
        else:
            self._ledger.processed(marker.id)
        if self._input is not None:
            self._input.send_drained(marker.id)
            if self._last is None:
                self._input.ack(marker.id)
        if Mark.END in mark:
            self._outcome = Outcome.FINISHED
        elif Mark.STOP in mark or (self._asked_s is not None and Mark.CHECKPOINT in mark):
            # Whoever has not asked waits a moment: when all are told to stop, STOP comes.
            self._outcome = Outcome.STOPPED

    def _report_evaluation(self, epoch: int) -> None:
        assert self._evaluation is not None
        result, samples = self._evaluation.result(), self._evaluation.samples
        self._evaluation = self._ledger.counts.evaluation = None
        self._meter.evaluated(result, samples)
        log.info(
            "epoch %d%s: %s",
            epoch,
            ", early head" if self._step.spec.tail is None else "",
            ", ".join(f"{k} {v:.4f}" for k, v in result.items()),
        )

    def _snapshot(self) -> None:
        """Keep the module's own state for its restart, where that is due and costs little."""
        spec, id, now_s = self._step.spec, self._meter.progress.id, time.monotonic()
        if not spec.snapshot_s or now_s < self._snapshot_due_s or self._checkpoints.busy:
            return
        if id <= self._snapshot_id or self._draining is not None:
            return
        self._checkpoints.write_snapshot(id, *self._state(id))
        self._snapshot_id = id
        took_s = time.monotonic() - now_s
        self._snapshot_due_s = now_s + max(spec.snapshot_s, took_s / SNAPSHOT_SHARE)

    def _state(self, cut: int, *, over: bool = False) -> State:
        tensors, own = snapshot(self._step)
        self._start.epoch = self._meter.progress.epoch
        before = self._before if self._output is None else _from(self._before, self._output.first)
        return tensors, own | document(
            self._start, self._ledger, over=over, before=before, position=self._position
        )

    def _heed_stop(self) -> None:
        self._stop.drain()
        if self._meter.state == "running":
            log.info("told to stop: leaving at the next checkpoint")
            self._meter.set_state("stopping")
            if self._input is None:
                self._wanted |= Mark.CHECKPOINT
        if self._input is None:
            if self._stop.alone:
                self._asked_s = self._stop.age_s
            elif not self._told_all:
                self._told_all = True
                self._wanted |= Mark.CHECKPOINT | Mark.STOP
        else:
            self._ask_for_a_checkpoint(self._input)
        if self._stop.age_s > self._step.spec.stop_grace_s:
            log.warning(
                "no checkpoint marker within %.0f s: leaving without one (the last stays)",
                self._step.spec.stop_grace_s,
            )
            self._outcome = Outcome.STOPPED

    def _ask_for_a_checkpoint(self, input: InputLink) -> None:
        age_s = self._stop.age_s
        due_s = 0.0 if self._stop.alone else REQUEST_AFTER_S
        if self._asked_s is not None:
            due_s = self._asked_s + ASK_AGAIN_S
        if age_s > due_s:
            self._asked_s = age_s
            input.request("checkpoint")

    def _write_metrics(self) -> None:
        input, output = self._input, self._output
        links = LinkFigures(
            window=None if output is None else self._step.spec.links.window,
            in_flight=0 if output is None else output.in_flight,
            gradients_dropped=0 if input is None else input.counters.gradients_dropped,
            refused={} if input is None else dict(input.counters.refused),
            missed=0 if output is None else output.counters.missed,
            replayed=0 if self._replay is None else self._replay.replayed,
            resent=0 if output is None else output.counters.resent,
            duplicates=0 if input is None else input.counters.duplicates,
            gaps=0 if input is None else input.counters.gaps,
        )
        self._meter.write(self._step, links)

    def _sleep(self) -> None:
        if self._outcome is not None:
            return
        if self._may_take() and self._train_again():
            return
        began = time.monotonic()
        if self._may_take():
            reason, poller = "input", self._any_poller
        else:
            full = self._output is not None and not self._output.room
            reason, poller = "window" if full else "gradient", self._output_poller
        poller.poll(POLL_MS)
        self._meter.waiting_s[reason] += time.monotonic() - began

    def _train_again(self) -> bool:
        """Train on a batch of the replay buffer, where the module upstream is gone."""
        if self._replay is None or self._input is None or self._stop():
            return False
        if time.monotonic() - self._heard_s < SILENT_S:
            return False
        if self._input.reaches_peer():
            self._heard_s = time.monotonic()  # it is there, and slow
            return False
        chosen = self._replay.choose()
        if chosen is None:
            return False
        self._step.replay(*chosen)
        return True


def _from(before: deque[tuple[int, Position]], first: int) -> Iterator[tuple[int, Position]]:
    return (entry for entry in before if entry[0] >= first)
