"""A module that only predicts: no loss, gradient interface, optimizer, ledger or checkpoints.

A batch is acknowledged upstream when it has been acknowledged downstream: in the end by the front,
which has its answer then. Until that, every module on its way can send its output again. So a
module that was restarted gets all that has no answer yet, and computes it again.
"""

from __future__ import annotations

import logging
import time

import torch
import zmq

from dni_runtime.core.forward import ModuleForward
from dni_runtime.garbage import collect_as_usual
from dni_runtime.link import Batch
from dni_runtime.worker.device import Copies, choose_device
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.farewell import POLL_MS
from dni_runtime.worker.join import Join
from dni_runtime.worker.links import Attempt, WorkerLinks
from dni_runtime.worker.resume import OWN, Start
from dni_runtime.worker.server import Stage

log = logging.getLogger(__name__)


class Predictor:
    """One attempt of a module that predicts, until it is told to stop: :meth:`live`."""

    def __init__(self, attempt: Attempt) -> None:
        spec = attempt.spec
        self._metrics, self._stop = attempt.metrics, attempt.stop
        device = choose_device(spec)
        self._module = ModuleForward(spec, device)
        torch.set_rng_state(self._module.random_state)
        if spec.initial:
            self._module.load_initial(attempt.run.initial(spec.module))
        self._copies = Copies(device)
        self._acked = 0
        start = Start(again=attempt.options.resume == OWN)
        self._links = WorkerLinks(attempt, start)

    def live(self) -> Stage:
        """Meet the neighbours, then answer until told to stop."""
        metrics, links = self._metrics, self._links
        try:
            links.listen()
            metrics.set_state("connecting")
            metrics.loaded_at = time.time()
            if links.meet() and links.input is not None and links.output is not None:
                metrics.set_state("running")
                metrics.started()
                collect_as_usual()
                self._serve(links.input, links.output)
            return Stage.FINISHED
        finally:
            links.close()

    def _serve(self, input: Join, output: Fanout) -> None:
        above, below = zmq.Poller(), zmq.Poller()
        for poller, links in ((above, (*input.links, *output.links)), (below, output.links)):
            for socket in (self._stop.wakeup, *(link.socket for link in links)):
                poller.register(socket, zmq.POLLIN)
        while not self._stop():
            self._acknowledge(input, output)
            self._metrics.report.check()
            room = output.room
            if room and self._answer_next(input, output):
                continue
            self._metrics.now("input" if room else "window")
            (above if room else below).poll(POLL_MS)

    def _acknowledge(self, input: Join, output: Fanout) -> None:
        """Acknowledge what downstream has acknowledged."""
        for link in output.links:
            self._links.neighbours.look(link)
        output.receive()
        if (done := output.first - 1) > self._acked:
            self._acked = done
            input.ack(done)

    def _answer_next(self, input: Join, output: Fanout) -> bool:
        """Send the next batch's output on; return whether something has come."""
        item = input.receive()
        if item is None:
            return False
        self._metrics.progress.id = item.id
        if isinstance(item, Batch):
            self._metrics.now("batch")
            x = tuple([self._copies.to_device(x) for x in item.xs])
            output.send_batch(item, self._copies.to_host(self._module.evaluate(x)).wait())
        else:
            output.send_mark(item.id, item.epoch, item.mark)
        return True
