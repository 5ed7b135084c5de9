"""The module server's loop: take the next item, train, send, and process late gradients.

The loop runs in the process's main thread and is the only one that computes. It never waits for
I/O while there is something to compute: sockets are read and written by ZeroMQ's own thread,
checkpoints by their writer's. It sleeps in one poll when the input is empty, the link's window is
full, or its gradient interface waits for the true gradient.

It is one file because it is one loop: every method is a turn of it and shares its state.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from enum import Enum

import zmq
from torch import Tensor

from dni_runtime.core.step import Gradients, ModuleStep
from dni_runtime.link import Batch, Drain, Gradient, Marker
from dni_runtime.run.cuts import document_file
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker.checkpoint import CheckpointWriter
from dni_runtime.worker.device import Copies, HostCopy
from dni_runtime.worker.divergence import DATA, Divergence
from dni_runtime.worker.evaluations import GATHER_MS, Evaluations
from dni_runtime.worker.exchange import Exchange
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.farewell import POLL_MS, Shutdown
from dni_runtime.worker.head import Head
from dni_runtime.worker.idle import Idle
from dni_runtime.worker.join import Join
from dni_runtime.worker.labels import Labels
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter, link_figures
from dni_runtime.worker.neighbours import Neighbours
from dni_runtime.worker.resume import Start
from dni_runtime.worker.saver import StateSaver
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.stream import Items

log = logging.getLogger(__name__)

END_EARLY = "end"
"""The tail's request to the head to end training early."""

FLUSH_SLICE_S = 0.5
"""Seconds between checks of the neighbours while waiting for downstream's acknowledgements."""

RESTART_S = 15.0
"""Seconds in which a supervisor says that a neighbour, which says that it has failed, is restarted:
its process must have ended, with a GPU or in a container."""

FAREWELL_S = 5.0
"""Longest wait until the module upstream has received the last acknowledgement."""


class Stage(Enum):
    """What a server does, or how it has ended."""

    TAKING = "taking items"
    DRAINING = "waiting for the gradients of batches before the marker"
    SHARING = "sharing what the replicas have learnt"
    GATHERING = "gathering the other replicas' parts of an evaluation"
    FINISHED = "finished"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """Whether nothing more is taken."""
        return self in (Stage.FINISHED, Stage.STOPPED)


class ModuleServer:
    """Serves one module; only ``_enter`` changes its stage.

    A marker is held until all that belongs before it is done; meanwhile no item is taken::

        stage      event                                         next       method
        TAKING     a marker, whose batches wait for gradients    DRAINING   _handle_marker
        TAKING     another marker                                SHARING    _handle_marker
        DRAINING   no more gradients will come                   SHARING    _give_up
        SHARING    all have shared, or the marker asks for none  GATHERING  _begin_sharing, _collect
        GATHERING  the evaluation is whole, or there is none     TAKING     _conclude
        GATHERING  the same, and the stream ends there           FINISHED   _conclude
        GATHERING  the same, and the module is to stop there     STOPPED    _conclude
        any        the time for a stop is over                   STOPPED    serve
    """

    def __init__(
        self,
        step: ModuleStep,
        *,
        metrics: MetricsWriter,
        checkpoints: CheckpointWriter,
        stop: StopRequest,
        start: Start,
        ledger: Ledger,
        stream: Items | None = None,  # the head's, from its position on
        labels: Labels | None = None,  # the tail's own; None: they come with the batches
        input: Join | None = None,  # None for the head
        output: Fanout | None = None,  # None for the tail
        exchange: Exchange | None = None,  # None if there are no other replicas
        neighbours: Neighbours | None = None,  # None: they never restart
    ) -> None:
        self._step = step
        self._metrics = metrics
        self._checkpoints = checkpoints
        self._stop = stop
        self._copies = Copies(step.device)
        self._answers: deque[tuple[int, int, HostCopy]] = deque()
        self._input = input
        self._labels = labels
        self._output = output
        self._exchange = exchange
        self._neighbours = neighbours
        self._start = start
        self._ledger = ledger
        self._head: Head | None = None
        if stream is not None:
            self._head = Head(stream, start=start, ledger=ledger, metrics=metrics, output=output)
        self._saver = StateSaver(
            step, checkpoints, cut=start.cut, progress=ledger.progress, head=self._head
        )
        self._shutdown = Shutdown(stop, metrics, head=self._head, input=input)
        self._divergence = Divergence(step, metrics, self._copies)
        self._evaluations = Evaluations(step, metrics, ledger, start)
        self._stage = Stage.TAKING
        self._marker: Marker | None = None  # that is held, or that the stream has ended with
        self._goes_on_alone = step.spec.links.on_loss == "continue"
        self._idle = Idle.of(step, input)
        below = [] if output is None else [link.socket for link in output.links]
        below += [] if exchange is None else [link.socket for link in exchange.links]
        above = [] if input is None else [link.socket for link in input.links]
        # Input that cannot be taken yet must not wake the loop up repeatedly.
        self._any_poller, self._output_poller = zmq.Poller(), zmq.Poller()
        for poller, sockets in ((self._any_poller, below + above), (self._output_poller, below)):
            for socket in (stop.wakeup, *sockets):
                poller.register(socket, zmq.POLLIN)

    def serve(self) -> Stage:
        """Run until the stream ends or the worker is told to stop; return how it ended."""
        while not self._stage.ended:
            stopping = self._stop()
            if stopping and self._shutdown.heed():
                self._enter(Stage.STOPPED, None)
                break
            if self._metrics.due(self._step):
                self._write_metrics()
                self._divergence.look(self._ledger.progress.id)
                if not stopping and not self._held:
                    self._saver.snapshot()
            self._collect()
            if not (self._stage.ended or (self._may_take() and self._take())):
                self._sleep()
        self._write_metrics()
        self._metrics.flush(wait=True)
        self._end_links()
        return self._stage

    def _end_links(self) -> None:
        """Flush the links downstream, then acknowledge the end of the stream.

        That comes last: until then modules upstream keep running, and can resend to a module that
        is restarted meanwhile. There is no marker if the module ends before one.
        """
        left_s = max(self._metrics.spec.stop_grace_s - self._stop.age_s, 0.1)
        self._metrics.now("window")
        if self._output is not None:
            self._flush(self._output, left_s)
        if self._exchange is not None:
            self._exchange.finish(min(left_s, FAREWELL_S))
        self._metrics.now("checkpoint")
        if self._marker is not None:
            self._checkpoints.flush()
            self._ledger.processed(self._marker.id)
            if self._input is not None:
                self._input.ack(self._marker.id)
                self._input.finish(min(left_s, FAREWELL_S))

    def _flush(self, output: Fanout, left_s: float) -> None:
        """Wait until downstream has acknowledged all; at the run's end, also for its restart."""
        end_s, remained_s, left = time.monotonic() + left_s, 0.0, list(output.links)
        slice_s = min(FLUSH_SLICE_S, left_s) / max(len(left), 1)
        while left := [link for link in left if not link.finish(slice_s)]:  # each gets its turn
            self._metrics.report.check()
            over = self._stage is Stage.FINISHED and not self._stop()
            if self._exchange is not None:
                self._exchange.greet()  # downstream may wait for a replica that still starts
            if self._neighbours is not None:
                for link in left:
                    self._neighbours.look(link)
                gone = [link.target for link in left if link.lost]
                if over and all(map(self._neighbours.remains, gone)):
                    remained_s = time.monotonic()
            if time.monotonic() >= (max(end_s, remained_s + RESTART_S) if over else end_s):
                log.warning(
                    "not everything was acknowledged by %s", ", ".join(link.target for link in left)
                )
                return

    def _enter(self, stage: Stage, marker: Marker | None) -> None:
        self._stage, self._marker = stage, marker

    @property
    def _held_marker(self) -> Marker:
        assert self._marker is not None
        return self._marker

    @property
    def _held(self) -> bool:
        """Whether a marker is not done with."""
        return self._stage in (Stage.DRAINING, Stage.SHARING, Stage.GATHERING)

    @property
    def _agreeing(self) -> bool:
        """Whether the replicas of the head have to agree where a marker goes."""
        return self._head is not None and self._head.waits

    def _may_take(self) -> bool:
        if self._held or self._step.blocked or self._agreeing:
            return False
        if self._output is None or self._output.room:
            return True
        return self._goes_on_alone and self._output.room_without_lost()

    def _take(self) -> bool:
        """Handle the next item, if there is one."""
        item: Batch | Marker | None
        if self._head is not None:
            item = self._head.next()
        else:
            assert self._input is not None
            item = self._input.receive()
        if item is None:
            return False
        if self._idle is not None:
            self._idle.heard()
        if isinstance(item, Marker):
            self._handle_marker(item)
        else:
            self._handle_batch(item if self._labels is None else self._labels.complete(item))
        return True

    def _handle_batch(self, batch: Batch) -> None:
        step, ledger = self._step, self._ledger
        self._metrics.now("batch")
        if self._labels is not None or (self._head is not None and step.spec.labelled):
            step.loss.check_labels(batch.y, f"batch {batch.id}: label ")  # before any module fails
        x = tuple([self._copies.to_device(one) for one in batch.xs])
        y_BY = self._copies.to_device(batch.y)
        gradients: Gradients = ()
        if batch.mode is not Mode.TRAIN:
            h_BH = step.evaluate(x)
            self._send_on(batch, self._copies.to_host(h_BH))
            if ledger.new(batch.id):
                self._evaluations.add(h_BH, y_BY)
            ledger.processed(batch.id)
        elif batch.id <= self._start.cut:  # only sent on: trained on before the restart
            self._send_on(batch, self._copies.to_host(step.forward_again(x)))
        else:
            self._end_epochs(batch.epoch - 1)
            gradients = self._train(batch, x, y_BY)
            ledger.trained(batch.id, batch.epoch, len(y_BY), ends=batch.ends)
            self._metrics.count_loss(step.counters.loss)
            if self._output is not None and batch.id <= self._output.drained and step.waiting:
                self._give_up_until(batch.id)  # its gradient will not come
            if self._idle is not None:
                self._idle.source.keep(x, y_BY)
        ledger.at(batch.id, batch.epoch)
        if self._input is not None:
            for place, link in enumerate(self._input.of(batch.id)):
                if not gradients or gradients[place] is None:
                    link.ack(batch.id)
        self._answer(batch.id, gradients)
        self._copies.pace()

    def _train(self, batch: Batch, x: tuple[Tensor, ...], y_BY: Tensor) -> Gradients:
        """Train on a batch, and send its activation on; return the gradients for upstream."""
        step, divergence = self._step, self._divergence
        if self._head is not None and not all(
            divergence.may_use(batch.id, DATA, one) for one in batch.data
        ):
            if self._output is not None:
                self._output.miss(batch)
            return ()
        h = self._copies.to_host(step.forward(batch.id, x, batch.part))
        # A device with more work does not wait for the sending.
        at_once = h.here or divergence.skips
        if at_once and not self._send_on(batch, h):
            return step.skip()
        gradients = step.update(y_BY)
        if not at_once:
            self._send_on(batch, h)
        divergence.note_loss(batch.id, step.counters.loss)
        return gradients

    def _end_epochs(self, epoch: int) -> None:
        """Step schedules to the end of an epoch, even if an earlier attempt got its marker."""
        for _ in range(self._ledger.end_epochs(epoch)):
            self._step.optimization.end_epoch()

    def _send_on(self, batch: Batch, h: HostCopy) -> bool:
        """Send an activation on; return whether it may be learnt from."""
        output = self._output
        if output is None:
            return True
        trains = batch.mode is Mode.TRAIN
        fine = not trains or self._divergence.may_use(batch.id, "the activation", h.wait())
        if fine:
            output.send_batch(batch, h.wait())
            fullest = output.fullest
            self._metrics.count_window(fullest.in_flight, fullest.window)
        else:
            output.miss(batch)
        return fine

    def _answer(self, id: int, gradients: Gradients) -> None:
        """Send gradients upstream, as soon as they are in host memory."""
        for place, g_BX in enumerate(gradients):
            if g_BX is not None:
                self._answers.append((id, place, self._copies.to_host(g_BX)))
        self._send_answers()

    def _send_answers(self, *, wait: bool = False) -> None:
        """Send the gradients that are in host memory; with ``wait``, all."""
        while self._answers and (wait or self._answers[0][2].here):
            assert self._input is not None
            id, place, g = self._answers.popleft()
            link = self._input.of(id)[place]
            link.send_gradient(id, g.wait(), ack=self._ledger.progress.id)

    def _collect(self) -> None:
        """Process what has come from downstream: gradients, and requests for the head."""
        self._send_answers()
        if self._head is not None:
            self._head.look(asks=not self._held)
        if self._exchange is not None:
            if self._neighbours is not None and self._exchange.output is not None:
                self._neighbours.look(self._exchange.output)
            if self._exchange.done() and self._stage is Stage.SHARING:
                self._conclude()
        if self._stage is Stage.GATHERING:
            self._conclude()
        if self._output is None:
            return
        if self._neighbours is not None:
            for output in self._output.links:
                self._neighbours.look(output)
        if self._stage is Stage.DRAINING and self._goes_on_alone and self._output.lost:
            self._give_up()
        for event in self._output.receive():
            if isinstance(event, Gradient):
                self._metrics.now("batch")
                fine = self._divergence.may_learn(event.id, event.g)
                g_BH = self._copies.to_device(event.g) if fine else None
                self._answer(event.id, self._step.late_gradient(event.id, g_BH))
            elif isinstance(event, Drain):
                if self._stage is Stage.DRAINING and event.id >= self._held_marker.id:
                    self._give_up()
                elif self._step.waiting:
                    self._give_up_until(event.id)
            else:
                self._ask_upstream(event.what)

    def _give_up_until(self, id: int) -> None:
        """Stop waiting for true gradients of batches up to this one: none will come."""
        self._step.give_up_waiting(id)
        if self._input is not None:
            self._input.send_drained(id, awaited=True)

    def _give_up(self) -> None:
        """Stop waiting for true gradients of batches before the marker: none will come."""
        self._step.give_up_waiting()
        self._begin_sharing()

    def _ask_upstream(self, what: str) -> None:
        """Pass on a request to the head: a checkpoint marker, or an early end."""
        if self._head is None:
            assert self._input is not None
            self._input.request(what)
        elif what == END_EARLY:
            self._head.end_early()
        else:
            self._head.want(Mark.CHECKPOINT | Mark.ASKED)

    def _handle_marker(self, marker: Marker) -> None:
        if self._output is not None:
            self._output.send_mark(marker.id, marker.epoch, marker.mark)
        self._enter(Stage.DRAINING, marker)
        if not self._step.waiting:
            self._begin_sharing()

    def _begin_sharing(self) -> None:
        self._send_answers(wait=True)
        marker = self._held_marker
        self._enter(Stage.SHARING, marker)
        if self._exchange is not None and Mark.SYNC in marker.mark and marker.id > self._start.cut:
            self._exchange.begin(marker)
        else:
            self._conclude()

    def _conclude(self) -> None:
        """Do what the marker stands for, once the evaluation before it is whole; then go on."""
        marker = self._held_marker
        self._enter(Stage.GATHERING, marker)
        ledger, mark = self._ledger, marker.mark
        new = ledger.new(marker.id)
        # A restarted module may get markers of evaluations that it has already reported.
        evaluated = new and mark & (Mark.EVAL | Mark.TEST)
        if evaluated and not self._evaluations.complete(marker):
            return
        if mark & (Mark.EVAL | Mark.TEST):
            self._step.end_evaluation()
        ledger.at(marker.id, marker.epoch)
        self._metrics.now("checkpoint" if Mark.CHECKPOINT in mark else "evaluation")
        if Mark.EPOCH in mark:
            self._end_epochs(marker.epoch)
            counts = ledger.progress.counts
            if new and counts.epoch == marker.epoch:
                self._metrics.epoch_ended(marker.epoch, counts.epoch_batches)
        if evaluated and self._evaluations.end(marker.epoch, test=Mark.TEST in mark):
            log.info("no better evaluation within the patience: training ends")
            self._ask_upstream(END_EARLY)
        if Mark.CHECKPOINT in mark and marker.id > self._start.cut:
            part = self._metrics.run.checkpoint(marker.id, self._step.spec.module)
            if ledger.progress.counts.id <= marker.id:
                finite = self._divergence.weights_finite(marker.id)
                self._saver.checkpoint(marker.id, over=Mark.END in mark, finite=finite)
                self._evaluations.checkpoint(marker.id)
            elif document_file(part).exists():  # by an earlier attempt
                # Its counts are those of the marker; now batches after it have been counted.
                self._evaluations.checkpoint(marker.id)
        last = marker if mark & (Mark.END | Mark.STOP) else None  # answered in _end_links
        if last is None:
            ledger.processed(marker.id)
        if self._input is not None:
            self._input.send_drained(marker.id)
            if last is None:
                self._input.ack(marker.id)
        stops = Mark.STOP in mark or self._shutdown.at(mark)
        after = Stage.STOPPED if stops else Stage.TAKING
        self._enter(Stage.FINISHED if Mark.END in mark else after, last)

    def _write_metrics(self) -> None:
        replayed = 0 if self._idle is None else self._idle.source.replayed
        figures = link_figures(self._input, self._output, self._exchange, replayed)
        connected = None if self._output is None else self._output.connected
        self._metrics.write(self._step, figures, connected, self._copies)

    def _sleep(self) -> None:
        self._send_answers(wait=True)
        may_take = self._may_take()
        full = self._output is not None and not self._output.room
        reason = "input" if may_take else "window" if full else "gradient"
        if self._agreeing or self._stage in (Stage.SHARING, Stage.GATHERING):
            reason = "replicas"
        if self._metrics.doing != reason:
            self._metrics.now(reason)
        if may_take and self._idle is not None and not self._stop() and self._idle.train():
            return
        began = time.monotonic()
        if not may_take and self._input is not None:
            self._input.listen()
        poller = self._any_poller if may_take else self._output_poller
        poller.poll(GATHER_MS if self._stage is Stage.GATHERING else POLL_MS)
        self._metrics.waiting_s[reason] += time.monotonic() - began
