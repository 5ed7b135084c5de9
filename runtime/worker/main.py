"""Starting a worker: spec, checkpoint, links, then the server's loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import torch

from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.step import ModuleStep, due
from dni_runtime.core.training import empty_batch
from dni_runtime.data import DataSource, Half, open_data
from dni_runtime.errors import CheckpointError, DiskError, StoppedError
from dni_runtime.files import is_full
from dni_runtime.garbage import collect_as_usual
from dni_runtime.run.cuts import remove_temporaries
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker import checkpoint
from dni_runtime.worker.device import choose_device
from dni_runtime.worker.exchange import Exchange, Pushes, exchange_spec
from dni_runtime.worker.labels import Labels
from dni_runtime.worker.links import Attempt, WorkerLinks, link_settings
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.neighbours import withdraw
from dni_runtime.worker.options import (
    chain_start,
    heeding_stop,
    keyring,
    load_spec,
    start_of,
    wait_for_others,
)
from dni_runtime.worker.predictor import Predictor
from dni_runtime.worker.resume import AUTO, Start, begin, forget_later
from dni_runtime.worker.server import ModuleServer, Stage
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import OWN, WorkerStart, replaced
from dni_runtime.worker.stream import Stream

log = logging.getLogger(__name__)


def serve(options: WorkerStart, stop: StopRequest, began: float) -> None:
    """Serve one module until the chain has finished; a stop ends in ``StoppedError``."""
    spec = load_spec(options)
    run = RunDir(Path(options.run))
    run.create()
    keys = keyring(options, run, spec.module)
    metrics = MetricsWriter(run, spec, options.attempt, began=began)
    metrics.chain_start = chain_start(options)
    metrics.set_state("starting")
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(metrics.report.regularly())
            if options.by_rank:
                stack.enter_context(heeding_stop(run, stop))
            elif options.first is not None:
                control, head = run.control(spec.module), spec.head is not None
                stack.enter_context(stop.obeying(control, options.attempt, head=head))
            if (warning := replaced(os.environ)) is not None:
                metrics.warn(warning)
            torch.set_num_threads(spec.cpus)
            role = Worker if spec.trained is None else Predictor
            outcome = role(Attempt(options, spec, run, metrics, stop, keys)).live()
    except BaseException as error:
        if is_full(error):
            full = DiskError(f"the disk is full: {error}", hint="make room")
            metrics.set_state("failed", full)
            raise full from error
        stopped = isinstance(error, StoppedError)
        metrics.set_state("stopped" if stopped else "failed", error)
        raise
    finally:
        withdraw(run, spec, options.attempt)
        keys.leave()
    metrics.set_state("finished" if outcome is Stage.FINISHED else "stopped")
    if outcome is Stage.STOPPED:
        if options.by_rank and metrics.chain_start is None and options.resume != OWN:
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

    def __init__(self, attempt: Attempt) -> None:
        options, spec, run, metrics = attempt.options, attempt.spec, attempt.run, attempt.metrics
        self._options, self._spec, self._run = options, spec, run
        self._metrics, self._stop = metrics, attempt.stop
        self._device = choose_device(spec)
        self._step = ModuleStep(spec, self._device)
        torch.set_rng_state(self._step.random_state)
        record = RunRecord.load(run.record)
        # A manual start has no record: the modules are those that were served here.
        served = (file.stem for file in run.worker("x").parent.glob("*.json"))
        self._chain = sorted(served) if record is None else list(record.modules)
        self._start, self._ledger = begin(
            options.resume,
            spec,
            run,
            self._step,
            self._chain,
            attempt=options.attempt,
            first=options.first,
        )
        if options.by_rank:
            self._start.begun = start_of(spec, options.start)
        if metrics.chain_start is not None and metrics.chain_start.cut is None:
            update = {"cut": self._start.cut}
            metrics.chain_start = metrics.chain_start.model_copy(update=update)
        metrics.progress = self._ledger.progress
        # on the CPU, where the labels are
        self._loss = ChainLoss(spec.loss, spec.prediction, spec.label)
        self._links = WorkerLinks(attempt, self._start)

    def live(self) -> Stage:
        """Meet the neighbours, then train until the end of the stream; return how it ended."""
        metrics, restarted = self._metrics, self._start.restarted
        metrics.now("data")
        source, labels = self._head_data(), self._tail_labels()
        metrics.now("start")
        try:
            self._join_replicas()
            self._links.listen()
            # Only one worker of a module writes: a second one could not bind the address.
            with contextlib.suppress(OSError):
                remove_temporaries(self._run, [self._spec.module])
            metrics.set_state("connecting")
            metrics.loaded_at = time.time()
            if not self._links.meet():
                return _left_behind(self._spec, self._start)
            if (
                self._options.resume == AUTO and not restarted
            ):  # the neighbours begin at the same cut
                forget_later(self._run, self._spec, self._start)
            if self._stop():
                raise StoppedError("stopped before training began")
            return self._train(source, labels)
        finally:
            self._ledger.close()
            self._links.close()

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

    def _join_replicas(self) -> None:
        """Open what a replica shares with the others by: a process group, or links."""
        spec, shared = self._spec, self._step.shared
        if shared is None:
            return
        beside = exchange_spec(spec, shared.words)
        exchange: Exchange
        if spec.backend is not None:
            from dni_runtime.worker.group import (
                Collective,  # some builds of torch lack it
                Group,
            )

            links = link_settings(self._options, spec)
            group = Group(
                shared, spec, self._run, begun=self._start.begun, device=self._device, links=links
            )
            exchange = Collective(shared, group, self._stop)
        else:
            exchange = (Exchange if shared.strategy.waits else Pushes)(
                shared,
                inputs=self._links.inputs(beside, beside.sources),
                done=self._start.cut,
                gone=self._links.neighbours.gone_for_good,
                restarted=self._start.restarted,
            )
        self._links.share_by(exchange, beside)

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
                input=self._links.input,
                output=self._links.output,
                exchange=self._links.exchange,
                neighbours=self._links.neighbours,
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


def _source_root(run: RunDir) -> Path:
    """Return the folder of user data sets: the image's sources, else the run's."""
    image = Path("/opt/dni/src")
    return image if image.is_dir() else run.sources
