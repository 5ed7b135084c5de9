"""A module that only predicts: no loss, gradient interface, optimizer, ledger or checkpoints.

A batch is acknowledged upstream when it has been acknowledged downstream: in the end by the front,
which has its answer then. Until that, every module on its way can send its output again. So a
module that was restarted gets all that has no answer yet, and computes it again.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import zmq
from torch import Tensor

from dni_runtime.core.exits import early_head, leaves
from dni_runtime.core.export import LAYERS_PREFIX
from dni_runtime.core.forward import ModuleForward
from dni_runtime.core.layers import load_initial
from dni_runtime.errors import DataError
from dni_runtime.garbage import collect_as_usual
from dni_runtime.link import Marker, OutputLink
from dni_runtime.spec.named import module_of
from dni_runtime.spec.predicting import exit_name
from dni_runtime.worker.device import Copies, choose_device
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.farewell import POLL_MS
from dni_runtime.worker.join import Join
from dni_runtime.worker.links import Attempt, WorkerLinks
from dni_runtime.worker.metrics import link_figures
from dni_runtime.worker.options import released_weights
from dni_runtime.worker.resume import Start
from dni_runtime.worker.server import Stage
from dni_runtime.worker.start import OWN

log = logging.getLogger(__name__)

_NOTED = 100
_DEATHS = 2
_SUSPECTS = 16
_LOG_S = 1.0

WHOLE = 1
"""As a batch's epoch: no sample leaves early."""


class Suspicion:
    """Which batches may kill the worker: they are noted for a while after a restart.

    A batch of which two restarted workers have died is not computed a third time. Another one may
    come first each time, by another link, so those that killed a worker before stay noted.
    """

    def __init__(self, file: Path, *, restarted: bool) -> None:
        self._file = file
        self._left = _NOTED if restarted else 0
        self._id, self._times = 0, dict[int, int]()  # the newest one; how often each has begun
        if restarted:
            with contextlib.suppress(OSError, ValueError):
                numbers = [int(word) for word in file.read_text().split()]
                self._times = dict(zip(numbers[::2], numbers[1::2], strict=True))

    def clears(self, id: int) -> bool:
        """Note that a batch is about to be computed; return whether it may be."""
        if self._left == 0:
            return True
        self._left -= 1
        self._times.pop(self._id, None)  # the worker has outlived it
        self._id = id if (times := self._times.pop(id, 0)) < _DEATHS else 0
        suspects = [*self._times.items(), (id, min(times + 1, _DEATHS))][-_SUSPECTS:]
        self._times = dict(suspects)
        with contextlib.suppress(OSError):  # then it may kill once more
            if self._left:
                self._file.write_text("\n".join(f"{one} {times}" for one, times in suspects))
            else:
                self._file.unlink()
        return self._id == id


@dataclass
class _Stream:
    """Batches that come in order on one lane of each input, and where they go."""

    input: Join
    onward: Fanout
    exit: OutputLink | None
    last: int = 0  # the last one that has come
    acked: int = 0

    @property
    def room(self) -> bool:
        """Whether another batch can be sent on."""
        return self.onward.room if self.exit is None else self.exit.room

    def acknowledge(self) -> None:
        """Acknowledge all before the first batch that may have to be sent again."""
        first = self.last + 1
        if self.exit is not None and self.exit.in_flight:
            first = self.exit.first
        # If what follows is out of reach, the front still has the exit's answers.
        if self.exit is None or (self.onward.room and self.onward.connected):
            first = min(first, self.onward.unanswered(first))
        if first - 1 > self.acked:
            self.acked = first - 1
            self.input.ack(self.acked)


class Predictor:
    """One attempt of a module that predicts, until it is told to stop: :meth:`live`.

    Its end is a stop, however it comes: there is no last batch.
    """

    def __init__(self, attempt: Attempt) -> None:
        spec = attempt.spec
        self._metrics, self._stop = attempt.metrics, attempt.stop
        device = choose_device(spec)
        self._module = ModuleForward(spec, device)
        torch.set_rng_state(self._module.random_state)
        if spec.initial:
            file = attempt.run.initial(module_of(spec.module))
            if (released := released_weights(spec)) is not None:
                load_initial(self._module.layers, released, LAYERS_PREFIX)
            if released is None or file.exists():  # all of them, or what others share with it
                self._module.load_initial(file)
        self._exit, self._head = spec.exit, None
        if spec.exit is not None:
            file = attempt.run.initial(exit_name(module_of(spec.module)))
            head = early_head(spec, spec.exit.interface, file)
            assert head is not None
            self._head = head.eval().to(device)
        self._copies = Copies(device)
        self._edges = spec.targets
        options = attempt.options
        alone = options.first is not None and options.first < options.attempt
        start = Start(restarted=alone or options.resume == OWN)
        self._suspicion = Suspicion(attempt.run.trying(spec.module), restarted=start.restarted)
        self._links = WorkerLinks(attempt, start)
        self._log_at_s = 0.0

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
            return Stage.STOPPED
        finally:
            links.close()

    def _serve(self, input: Join, output: Fanout) -> None:
        streams = self._streams(input.streams(), output)
        pollers: dict[tuple[bool, ...], zmq.Poller] = {}
        while not self._stop():
            for link in output.links:
                self._links.neighbours.look(link)
            output.receive()
            self._metrics.report.check()
            if self._metrics.interval_over:
                links = link_figures(input, output, None, 0)
                self._metrics.predicted(links, output.connected)
            rooms = []
            come = False
            for stream in streams:
                stream.acknowledge()
                rooms.append(stream.room)
                come |= stream.room and self._answer_next(stream)
            if come:
                continue
            reason, began_s = "input" if any(rooms) else "window", time.monotonic()
            self._metrics.now(reason)
            key = tuple(rooms)
            if key not in pollers:
                pollers[key] = self._poller(output, streams, key)
            pollers[key].poll(POLL_MS)
            self._metrics.waiting_s[reason] += time.monotonic() - began_s

    def _streams(self, inputs: Sequence[Join], output: Fanout) -> list[_Stream]:
        """Divide the links downstream among the streams."""
        links = iter(output.links)
        lanes = [[next(links) for _ in edge.links] for edge in self._edges]
        shares = [
            [
                some[len(some) * n // len(inputs) : len(some) * (n + 1) // len(inputs)]
                for some in lanes
            ]
            for n in range(len(inputs))
        ]
        exits = [share.pop()[0] if self._exit is not None else None for share in shares]
        return [
            _Stream(input, Fanout(share), exit)
            for input, share, exit in zip(inputs, shares, exits, strict=True)
        ]

    def _poller(
        self, output: Fanout, streams: Sequence[_Stream], rooms: Sequence[bool]
    ) -> zmq.Poller:
        """Return what wakes this worker, if so many streams have room."""
        poller = zmq.Poller()
        ready = [stream.input.links for stream, room in zip(streams, rooms, strict=True) if room]
        for link in (*output.links, *chain.from_iterable(ready)):
            poller.register(link.socket, zmq.POLLIN)
        poller.register(self._stop.wakeup, zmq.POLLIN)
        return poller

    def _answer_next(self, stream: _Stream) -> bool:
        """Send the next batch's output on; return whether something has come."""
        item, onward, exit = stream.input.receive(), stream.onward, stream.exit
        if item is None:
            return False
        stream.last = item.id
        progress = self._metrics.progress
        progress.id = max(progress.id, item.id)
        if isinstance(item, Marker):
            onward.send_mark(item.id, item.epoch, item.mark)
            if exit is not None:
                exit.send_mark(item.id, item.epoch, item.mark)
            return True
        progress.counts.step += 1
        progress.counts.samples += len(item.y)
        self._metrics.now("batch")
        try:
            if not self._suspicion.clears(item.id):
                raise DataError(f"{_DEATHS} workers have died of it")
            x = tuple([self._copies.to_device(x) for x in item.xs])
            h, p = self._compute(x)
        except Exception as error:  # users' layers may raise any: this batch fails alone
            self._note(item.id, error)
            if self._module.device.type == "cuda":
                torch.cuda.synchronize()  # an error of the device itself lasts
            onward.miss(item)
            if exit is not None:
                exit.miss(item.id, item.epoch)
            return True
        if exit is None or p is None or self._exit is None:
            onward.send_batch(item, h)
            return True
        whole = item.epoch == WHOLE
        stay = torch.ones(len(p)).bool() if whole else ~leaves(p, self._exit.threshold)
        exit.send_batch(replace(item, data=((~stay).byte(),)), p)
        if not stay.any():
            onward.miss(item)
        else:
            onward.send_batch(replace(item, y=item.y[stay]), h if stay.all() else h[stay])
        return True

    def _note(self, id: int, error: Exception) -> None:
        """Log where a layer has failed, not what it says: that may be a part of a request."""
        now_s = time.monotonic()
        if now_s >= self._log_at_s:  # clients decide how often it happens
            self._log_at_s = now_s + _LOG_S
            where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            log.error("batch %d has no answer: %s\n%s", id, type(error).__name__, where)

    @torch.no_grad()
    def _compute(self, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Return the activation, and the prediction of the early head; both on the host."""
        h = self._module.evaluate(x)
        p = None if self._head is None else self._head.predict(h)
        prediction = None if p is None else self._copies.to_host(p)
        return self._copies.to_host(h).wait(), None if prediction is None else prediction.wait()
