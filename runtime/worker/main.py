"""Starting a worker: spec, checkpoint, links, then the server's loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.step import ModuleStep, due
from dni_runtime.core.training import empty_batch
from dni_runtime.cuts import remove_temporaries
from dni_runtime.data import Half, open_data
from dni_runtime.documents.records import RunRecord
from dni_runtime.errors import (
    CheckpointError,
    StoppedError,
    UsageError,
)
from dni_runtime.garbage import collect_as_usual
from dni_runtime.keys import RunKeys
from dni_runtime.link import InputLink, OutputLink, listen_address
from dni_runtime.rundir import RunDir, socket_folder
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
from dni_runtime.worker.server import ModuleServer, Outcome
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
            outcome = _serve(options, spec, run, metrics, stop, keys)
    except BaseException as error:
        stopped = isinstance(error, StoppedError)
        metrics.set_state("stopped" if stopped else "failed", error)
        raise
    finally:
        withdraw(run, spec, options.attempt)
        keys.leave()
    metrics.set_state(outcome.value)
    if outcome is Outcome.STOPPED:
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


def _serve(
    options: WorkerStart,
    spec: WorkerSpec,
    run: RunDir,
    metrics: MetricsWriter,
    stop: StopRequest,
    keys: RunKeys,
) -> Outcome:
    warning = replaced(os.environ)
    if warning is not None:
        metrics.warn(warning)
    torch.set_num_threads(spec.cpus)
    device = choose_device(spec)
    step = ModuleStep(spec, device)
    torch.set_rng_state(step.random_state)
    record = RunRecord.load(run.record)
    # A manual start has no record: the modules are those that were served here.
    served = (file.stem for file in run.worker("x").parent.glob("*.json"))
    chain = sorted(served) if record is None else list(record.modules)
    start, ledger = begin(
        options.resume,
        spec,
        run,
        step,
        chain,
        attempt=options.attempt,
        first=options.first,
    )
    if options.by_rank:
        start.begun = start_of(spec, options.start)
    metrics.progress = ledger.progress
    source = labels = None
    loss = ChainLoss(spec.loss, spec.prediction, spec.label)  # on the CPU, where the labels are
    root, seed = _source_root(run), spec.seed
    metrics.now("data")
    if spec.head is not None:
        data = spec.head.data.at(options.data).of_replica(spec.replica)
        half: Half | None = None if data.labels is None else "samples"
        source = open_data(data, root, seed=seed, half=half)
    if spec.tail is not None and spec.tail.labels is not None:
        data = spec.tail.labels.at(options.data)
        labels = Labels(open_data(data, root, seed=seed, half="labels"), loss)
    metrics.now("start")
    input: Join | None = None
    output: Fanout | None = None
    exchange: Exchange | None = None
    name = run.root.name if record is None else record.name
    again = start.again
    to_peer = partial(
        OutputLink,
        run=name,
        keys=keys,
        cut=None if again else start.cut,
        attempt=options.attempt,
    )
    neighbours = Neighbours(
        spec, run, address=options.connect, again=again, stop=stop, since=options.first or 0
    )
    try:
        listening: dict[InputLink, EdgeSpec] = {}

        def listen(spec: WorkerSpec, edge: EdgeSpec) -> InputLink:
            link = InputLink(spec, edge, run=name, received=start.cut, again=again, keys=keys)
            listening[link] = edge
            return link

        if spec.sources:
            links = [[listen(spec, link) for link in edge.links] for edge in spec.sources]
            input = Join(links)
            neighbours.callers.append(input)
        beside = exchange_spec(spec, 0 if step.shared is None else step.shared.words)
        if step.shared is not None and spec.backend is not None:
            from dni_runtime.worker.collective import Collective  # some builds of torch lack it
            from dni_runtime.worker.group import Group

            exchange = Collective(
                step.shared,
                Group(
                    step.shared,
                    spec,
                    run,
                    begun=start.begun,
                    device=device,
                    links=_links(options, spec),
                ),
                stop,
            )
        elif step.shared is not None:
            exchange = (Exchange if step.shared.strategy.waits else Pushes)(
                step.shared,
                inputs=[listen(beside, edge) for edge in beside.sources],
                done=start.cut,
                gone=neighbours.gone_for_good,
            )
        if exchange is not None:
            neighbours.callers.append(exchange)
        if listening:
            publish(run, spec, options.attempt, _listen(listening, options, spec), keys)
        # Only one worker of a module writes: a second one could not bind the address.
        with contextlib.suppress(OSError):
            remove_temporaries(run, [spec.module])
        metrics.set_state("connecting")
        metrics.loaded_at = time.time()
        if input is not None and again:
            # What modules upstream can still send decides what can be sent on.
            if not neighbours.wait_for_upstream(input):
                return _left_behind(spec, start)
            received = input.received
            input.start_after(received)
            start.first_id = received + 1
            if had := max(received, start.cut):
                input.send_drained(had)  # it will not be trained on them again
        if spec.targets:
            output = Fanout(
                [
                    [to_peer(spec, link, next_id=start.first_id) for link in edge.links]
                    for edge in spec.targets
                ]
            )
            for below in output.links:
                neighbours.connect(below)
        if exchange is not None and beside.targets:
            exchange.output = to_peer(beside, next_id=start.cut + 1)
            neighbours.connect(exchange.output)
        if input is not None and not again:
            neighbours.wait_for_upstream(input)
        if options.resume == AUTO and not again:  # the neighbours have begun at the same cut
            forget_later(run, spec, start)
        if stop():
            raise StoppedError("stopped before training began")
        ledger.at(start.first_id - 1)
        metrics.set_state("running")
        metrics.started()
        log.info(
            "module %s runs on %s: %s -> %s, after %d of the stream",
            spec.module, device, " and ".join(map(str, spec.arguments)), spec.output, start.cut,
        )  # fmt: skip
        prunes = chain if spec.head is not None or spec.tail is not None else []
        writer = checkpoint.CheckpointWriter(
            run, spec.module, prunes, spec.keep, metrics.warn, metrics.all_is_well
        )
        metrics.saving = lambda: writer.saved_bytes if writer.busy else None
        stream = None
        if source is not None and spec.head is not None:
            stream = Stream(
                source,
                spec.head,
                start.position,
                shared=spec.replicas > 1,
                loss=loss if spec.labelled else None,
            )
        try:
            server = ModuleServer(
                step,
                metrics=metrics,
                checkpoints=writer,
                stop=stop,
                start=start,
                ledger=ledger,
                stream=stream,
                labels=labels,
                input=input,
                output=output,
                exchange=exchange,
                neighbours=neighbours,
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
    finally:
        ledger.close()
        for link in (output, input, exchange):
            if link is not None:
                link.close()
        if options.first is None and options.ipc:  # manual start: nobody else does it
            with contextlib.suppress(OSError):
                Path(options.ipc).rmdir()


def _listen(
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


def _left_behind(spec: WorkerSpec, start: Start) -> Outcome:
    """Finish like the module upstream, unless the end of the stream is lost."""
    if start.over:
        return Outcome.FINISHED
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
