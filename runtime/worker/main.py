"""Starting a worker: spec, checkpoint, links, then the server's loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.step import ModuleStep, due
from dni_runtime.core.training import empty_batch
from dni_runtime.data import DataSource, Half, open_data
from dni_runtime.errors import CheckpointError, StoppedError, UsageError
from dni_runtime.garbage import collect_as_usual
from dni_runtime.link import InputLink, OutputLink, listen_address
from dni_runtime.run.cuts import remove_temporaries
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.keys import RunKeys
from dni_runtime.run.rundir import RunDir, socket_folder
from dni_runtime.spec import EdgeSpec, LinksSpec, WorkerSpec
from dni_runtime.worker import checkpoint
from dni_runtime.worker.device import choose_device
from dni_runtime.worker.exchange import Exchange, exchange_spec
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join
from dni_runtime.worker.labels import Labels
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.neighbours import Neighbours, publish, withdraw
from dni_runtime.worker.options import load_spec
from dni_runtime.worker.pushes import Pushes
from dni_runtime.worker.rank import heeding_stop, start_of, wait_for_others
from dni_runtime.worker.resume import AUTO, Start, begin, forget_later
from dni_runtime.worker.server import ModuleServer, Stage
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import WorkerStart
from dni_runtime.worker.stream import Stream
from dni_runtime.worker.version import replaced

log = logging.getLogger(__name__)


def serve(options: WorkerStart, stop: StopRequest, began: float) -> None:
    """Serve one module until the chain has finished; a stop ends in ``StoppedError``.

    ``began`` is the Unix time of the program's start.
    """
    spec = load_spec(options)
    run = RunDir(Path(options.run))
    run.create()
    metrics = MetricsWriter(run, spec, options.attempt, began=began)
    metrics.set_state("starting")
    keys = RunKeys(run, spec.module)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(metrics.report.regularly())
            if options.by_rank:
                stack.enter_context(heeding_stop(run, stop))
            elif options.first is not None:
                stack.enter_context(stop.obeying(run.control(spec.module), options.attempt))
            if (warning := replaced(os.environ)) is not None:
                metrics.warn(warning)
            torch.set_num_threads(spec.cpus)
            outcome = Worker(options, spec, run, metrics, stop, keys).live()
    except BaseException as error:
        stopped = isinstance(error, StoppedError)
        metrics.set_state("stopped" if stopped else "failed", error)
        raise
    finally:
        withdraw(run, spec, options.attempt)
        keys.leave()
    metrics.set_state("finished" if outcome is Stage.FINISHED else "stopped")
    if outcome is Stage.STOPPED:
        if options.by_rank:
            record = RunRecord.load(run.record)
            wait_for_others(run, () if record is None else record.modules, spec.stop_grace_s)
        raise StoppedError("stopped before the end of the run", hint="resume it to continue")


def selftest(spec: WorkerSpec) -> None:
    """Build the module and train it on two batches of zeros, as the ``%test`` of an image."""
    step = ModuleStep(spec)
    for id in (1, 2):
        h_BH = step.forward(id, tuple(empty_batch(one, 2, "cpu") for one in spec.inputs))
        step.update(empty_batch(spec.label, 2, "cpu"))
        if due(id, spec.gradients_in):
            step.late_gradient(id, torch.zeros_like(h_BH))


class Worker:
    """One attempt of a module, from its state to the end of the stream: :meth:`live`.

    What it consists of follows from its roles; one worker may have several:

    =========  ===============================================================
    role       has
    =========  ===============================================================
    any        a step with its state, a ledger, and a checkpoint writer
    head       a stream of its data set, in place of inputs
    middle     inputs from upstream and outputs downstream
    tail       labels, if they stay with it, in place of outputs
    a replica  an exchange with the other replicas
    =========  ===============================================================
    """

    def __init__(
        self,
        options: WorkerStart,
        spec: WorkerSpec,
        run: RunDir,
        metrics: MetricsWriter,
        stop: StopRequest,
        keys: RunKeys,
    ) -> None:
        self._options = options
        self._spec = spec
        self._run = run
        self._metrics = metrics
        self._stop = stop
        self._keys = keys
        self._device = choose_device(spec)
        self._step = ModuleStep(spec, self._device)
        torch.set_rng_state(self._step.random_state)
        record = RunRecord.load(run.record)
        self._name = run.root.name if record is None else record.name
        # A manual start has no record: the modules are those that were served here.
        served = (file.stem for file in run.worker("x").parent.glob("*.json"))
        self._chain = sorted(served) if record is None else list(record.modules)
        attempt, first = options.attempt, options.first
        self._start, self._ledger = begin(
            options.resume, spec, run, self._step, self._chain, attempt=attempt, first=first
        )
        if options.by_rank:
            self._start.begun = start_of(spec, options.start)
        metrics.progress = self._ledger.progress
        # on the CPU, where the labels are
        self._loss = ChainLoss(spec.loss, spec.prediction, spec.label)
        self._neighbours = Neighbours(
            spec,
            run,
            address=options.connect,
            again=self._start.again,
            stop=stop,
            since=first or 0,
        )
        self._listening: dict[InputLink, EdgeSpec] = {}
        self._input: Join | None = None
        self._output: Fanout | None = None
        self._exchange: Exchange | None = None

    def live(self) -> Stage:
        """Meet the neighbours, then train until the end of the stream; return how it ended."""
        metrics, again = self._metrics, self._start.again
        metrics.now("data")
        source, labels = self._head_data(), self._tail_labels()
        metrics.now("start")
        try:
            if self._spec.sources:
                self._input = self._upstream()
            self._exchange = self._with_replicas()
            self._listen()
            metrics.set_state("connecting")
            metrics.loaded_at = time.time()
            if self._input is not None and again and not self._go_on_after(self._input):
                return _left_behind(self._spec, self._start)
            self._connect()
            if self._input is not None and not again:
                self._neighbours.wait_for_upstream(self._input)
            if self._options.resume == AUTO and not again:  # the neighbours begin at the same cut
                forget_later(self._run, self._spec, self._start)
            if self._stop():
                raise StoppedError("stopped before training began")
            return self._train(source, labels)
        finally:
            self._close()

    def _head_data(self) -> DataSource | None:
        if self._spec.head is None:
            return None
        data = self._spec.head.data.at(self._options.data).of_replica(self._spec.replica)
        half: Half | None = None if data.labels is None else "samples"
        return open_data(data, _source_root(self._run), seed=self._spec.seed, half=half)

    def _tail_labels(self) -> Labels | None:
        """Return the labels of a tail that keeps them; else they come with the batches."""
        if self._spec.tail is None or self._spec.tail.labels is None:
            return None
        data = self._spec.tail.labels.at(self._options.data)
        root, seed = _source_root(self._run), self._spec.seed
        return Labels(open_data(data, root, seed=seed, half="labels"), self._loss)

    def _upstream(self) -> Join:
        links = [
            [self._from(self._spec, link) for link in edge.links] for edge in self._spec.sources
        ]
        join = Join(links)
        self._neighbours.callers.append(join)
        return join

    def _with_replicas(self) -> Exchange | None:
        """Return what a replica shares with the others by: a process group, or links."""
        spec, shared = self._spec, self._step.shared
        if shared is None:
            return None
        exchange: Exchange
        if spec.backend is not None:
            from dni_runtime.worker.collective import Collective  # some builds of torch lack it
            from dni_runtime.worker.group import Group

            links = _links(self._options, spec)
            group = Group(
                shared, spec, self._run, begun=self._start.begun, device=self._device, links=links
            )
            exchange = Collective(shared, group, self._stop)
        else:
            beside = exchange_spec(spec, shared.words)
            exchange = (Exchange if shared.strategy.waits else Pushes)(
                shared,
                inputs=[self._from(beside, edge) for edge in beside.sources],
                done=self._start.cut,
                gone=self._neighbours.gone_for_good,
            )
        self._neighbours.callers.append(exchange)
        return exchange

    def _from(self, spec: WorkerSpec, edge: EdgeSpec) -> InputLink:
        """Return the end of a link that another worker opens."""
        link = InputLink(
            spec,
            edge,
            run=self._name,
            received=self._start.cut,
            again=self._start.again,
            keys=self._keys,
        )
        self._listening[link] = edge
        return link

    def _to(self, spec: WorkerSpec, edge: EdgeSpec | None = None, *, next_id: int) -> OutputLink:
        """Return the end of a link that this worker opens."""
        return OutputLink(
            spec,
            edge,
            run=self._name,
            next_id=next_id,
            keys=self._keys,
            cut=None if self._start.again else self._start.cut,
            attempt=self._options.attempt,
        )

    def _listen(self) -> None:
        """Bind all links that others open, and say where."""
        if self._listening:
            addresses = _bind(self._listening, self._options, self._spec)
            publish(self._run, self._spec, self._options.attempt, addresses, self._keys)
        # Only one worker of a module writes: a second one could not bind the address.
        with contextlib.suppress(OSError):
            remove_temporaries(self._run, [self._spec.module])

    def _go_on_after(self, input: Join) -> bool:
        """Start where modules upstream can still send, which decides what can be sent on.

        Returns False if one of them has finished.
        """
        if not self._neighbours.wait_for_upstream(input):
            return False
        received = input.received
        input.start_after(received)
        self._start.first_id = received + 1
        if had := max(received, self._start.cut):
            input.send_drained(had)  # it will not be trained on them again
        return True

    def _connect(self) -> None:
        """Open the links downstream, and a replica's to the first one."""
        spec, next_id = self._spec, self._start.first_id
        if spec.targets:
            self._output = Fanout(
                [
                    [self._to(spec, link, next_id=next_id) for link in edge.links]
                    for edge in spec.targets
                ]
            )
            for below in self._output.links:
                self._neighbours.connect(below)
        if self._exchange is not None and self._step.shared is not None:
            beside = exchange_spec(spec, self._step.shared.words)
            if beside.targets:
                self._exchange.output = self._to(beside, next_id=self._start.cut + 1)
                self._neighbours.connect(self._exchange.output)

    def _train(self, source: DataSource | None, labels: Labels | None) -> Stage:
        spec, metrics, start = self._spec, self._metrics, self._start
        self._ledger.at(start.first_id - 1)
        metrics.set_state("running")
        metrics.started()
        log.info(
            "module %s runs on %s: %s -> %s, after %d of the stream",
            spec.module, self._device, " and ".join(map(str, spec.arguments)), spec.output,
            start.cut,
        )  # fmt: skip
        prunes = self._chain if spec.head is not None or spec.tail is not None else []
        writer = checkpoint.CheckpointWriter(
            self._run, spec.module, prunes, spec.keep, metrics.warn, metrics.all_is_well
        )
        metrics.saving = lambda: writer.saved_bytes if writer.busy else None
        stream = None
        if source is not None and spec.head is not None:
            loss = self._loss if spec.labelled else None
            shared = spec.replicas > 1
            stream = Stream(source, spec.head, start.position, shared=shared, loss=loss)
        try:
            server = ModuleServer(
                self._step,
                metrics=metrics,
                checkpoints=writer,
                stop=self._stop,
                start=start,
                ledger=self._ledger,
                stream=stream,
                labels=labels,
                input=self._input,
                output=self._output,
                exchange=self._exchange,
                neighbours=self._neighbours,
            )
            collect_as_usual()
            outcome = server.serve()
        finally:
            if stream is not None:
                stream.close()  # also ends reading ahead
            if labels is not None:
                labels.close()
            writer.close()
        if writer.failure is not None:
            raise writer.failure
        return outcome

    def _close(self) -> None:
        self._ledger.close()
        for link in (self._output, self._input, self._exchange):
            if link is not None:
                link.close()
        folder = self._options.ipc
        if self._options.first is None and folder:  # manual start: nobody else does it
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _bind(
    links: Mapping[InputLink, EdgeSpec], options: WorkerStart, spec: WorkerSpec
) -> dict[str, str]:
    """Bind all links that others open; return their addresses, by the others' names."""
    if options.listen is not None and len(links) > 1:
        raise UsageError(
            f"module {spec.module!r} has {len(links)} inputs, and '--listen' one address",
            hint="use --transport, --interface and 'links.port'",
        )
    folder = Path(options.ipc) if options.ipc else socket_folder(Path(options.run))
    addresses: dict[str, str] = {}
    for link, edge in links.items():
        first = not addresses
        socket = spec.module if first else f"{spec.module}.{edge.number}"
        wanted = options.listen or listen_address(
            _links(options, spec), edge.number, folder, socket
        )
        addresses[edge.source] = link.bind(wanted)
        log.info("module %s listens on %s", spec.module, addresses[edge.source])
    return addresses


def _left_behind(spec: WorkerSpec, start: Start) -> Stage:
    """Finish like the module upstream, unless the end of the stream is lost."""
    if start.over:
        return Stage.FINISHED
    above = " or ".join(repr(edge.source) for edge in spec.sources)
    raise CheckpointError(
        f"module {above} has finished, but the last checkpoint of {spec.module!r} is "
        f"at {start.cut} of the stream, before its end",
        hint="continue from the newest complete checkpoint with 'dnictl resume'",
    )


def _links(options: WorkerStart, spec: WorkerSpec) -> LinksSpec:
    """The chain's links, with the command line's settings for the one from upstream."""
    given = {"transport": options.transport, "interface": options.interface}
    return spec.links.model_copy(update={k: v for k, v in given.items() if v is not None})


def _source_root(run: RunDir) -> Path:
    """Return the folder of user data sets: the image's sources, else the run's."""
    image = Path("/opt/dni/src")
    return image if image.is_dir() else run.sources
