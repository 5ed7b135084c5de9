"""Starting a worker: spec, checkpoint, links, then the server's loop."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from dni_runtime.core.step import ModuleStep, due
from dni_runtime.core.training import empty_batch
from dni_runtime.data import open_data
from dni_runtime.errors import (
    DataError,
    DniError,
    EncryptionError,
    ImageError,
    StoppedError,
    UnavailableError,
    UsageError,
)
from dni_runtime.link import InputLink, OutputLink, encrypted, listen_address
from dni_runtime.link.keys import RunKeys
from dni_runtime.rundir import (
    RunDir,
    complete_cuts,
    read_json,
    socket_folder,
    write_json,
)
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker import checkpoint
from dni_runtime.worker.metrics import Meter
from dni_runtime.worker.server import ModuleServer, Outcome
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.stream import Position, items

log = logging.getLogger(__name__)

CONNECT_SLICE_S = 3.0
"""A neighbour's endpoint is read again this often while it does not answer."""


@dataclass(frozen=True)
class Options:
    """The worker's command line; see ``python -m dni_runtime.worker --help``."""

    run: Path
    module: str | None = None
    spec: Path | None = None
    image_spec: Path | None = None
    ipc: Path | None = None
    data: str | None = None
    listen: str | None = None
    connect: str | None = None
    attempt: int = 1
    resume: str = "auto"


def serve(options: Options, stop: StopRequest) -> None:
    """Serve one module until the chain has finished.

    Raises:
        StoppedError: The worker was told to stop, and left.
        DniError: Whatever else went wrong.
    """
    spec = load_spec(options)
    run = RunDir(options.run)
    run.create()
    meter = Meter(run, spec, options.attempt)
    meter.set_state("starting")
    keys = RunKeys(run, spec.module)
    try:
        outcome = _serve(options, spec, run, meter, stop, keys)
    except BaseException as error:
        stopped = isinstance(error, StoppedError)
        meter.set_state("stopped" if stopped else "failed", str(error))
        raise
    finally:
        run.endpoint(spec.module).unlink(missing_ok=True)
        keys.leave()
    meter.set_state(outcome.value)
    if outcome is Outcome.STOPPED:
        raise StoppedError("stopped before the end of the run", hint="resume it to go on")


def load_spec(options: Options) -> WorkerSpec:
    """Read the module's spec: the image's own, checked against the run's where there is one.

    Raises:
        UsageError: There is no spec, or no module was named.
        ImageError: The image is of another spec than the run.
    """
    image = options.image_spec
    if options.spec is not None:
        return _read_spec(options.spec)
    own = _read_spec(image) if image is not None and image.is_file() else None
    module = options.module or (own.module if own is not None else None)
    if module is None:
        raise UsageError("which module?", hint="name it with --module")
    path = RunDir(options.run).spec(module)
    if not path.is_file():
        if own is None:
            raise UsageError(
                f"there is no spec of module {module!r} in {str(path)!r}",
                hint="start the chain with 'dnictl up', or name the spec with --spec",
            )
        wanted = own
    else:
        wanted = _read_spec(path)
    if own is not None and own.hash != wanted.hash:
        raise ImageError(
            f"the image serves module {own.module!r} of another spec (image {own.hash[:12]}, "
            f"run {wanted.hash[:12]})",
            hint="build the images again with 'dnictl build'",
        )
    return wanted


def selftest(spec: WorkerSpec) -> None:
    """Build the module and train it on two batches of zeros; what an image's ``%test`` runs."""
    step = ModuleStep(spec)
    for id in (1, 2):
        h_BH = step.forward(id, empty_batch(spec.input, 2, "cpu"))
        step.update(empty_batch(spec.label, 2, "cpu"))
        if due(id, spec.gradients_in):
            step.late_gradient(id, torch.zeros_like(h_BH))


def _serve(
    options: Options,
    spec: WorkerSpec,
    run: RunDir,
    meter: Meter,
    stop: StopRequest,
    keys: RunKeys,
) -> Outcome:
    torch.set_num_threads(spec.cpus)
    device = choose_device(spec)
    step = ModuleStep(spec, device)
    torch.set_rng_state(step.random_state)
    record = read_json(run.record) or {}
    # By hand nobody wrote a record: the modules are those that have been served here.
    chain = record.get("modules") or sorted(f.stem for f in run.worker("x").parent.glob("*.json"))
    cut, position = _resume(options, spec, run, step, meter, chain)
    source = None
    if spec.head is not None:
        data = spec.head.data.at(options.data)
        source = open_data(data, _source_root(run), seed=spec.seed)
    input, output = None, None
    name = str(record.get("run", options.run.name))
    try:
        if spec.upstream is not None:
            input = InputLink(spec, run=name, received=cut, keys=keys)
            folder = options.ipc or socket_folder(options.run)
            wanted = options.listen or listen_address(spec.links, spec.index, folder, spec.module)
            address = input.bind(wanted)
            _publish(run, spec, options.attempt, address, keys)
            log.info("module %s listens on %s", spec.module, address)
        meter.set_state("connecting")
        if spec.downstream is not None:
            output = OutputLink(spec, run=name, next_id=cut + 1, keys=keys)
            _connect(output, input, options, spec, run, stop)
        if input is not None:
            input.wait_for_peer(spec.links.connect_timeout_s, stop)
        if stop():
            raise StoppedError("stopped before training began")
        meter.set_state("running")
        meter.start_from_here()
        log.info(
            "module %s runs on %s: %s -> %s, after %d of the stream",
            spec.module, device, spec.input, spec.output, cut,
        )  # fmt: skip
        errors: list[DniError] = []
        writer = checkpoint.CheckpointWriter(run, spec.module, chain, spec.keep, errors.append)
        try:
            server = ModuleServer(
                step,
                meter=meter,
                checkpoints=writer,
                stop=stop,
                stream=items(source, spec.head, position) if source and spec.head else None,
                input=input,
                output=output,
                first_id=cut + 1,
                position=position,
            )
            outcome = server.serve()
        finally:
            writer.close()
        if errors:
            raise errors[-1]
        return outcome
    finally:
        for link in (output, input):
            if link is not None:
                link.close()


def choose_device(spec: WorkerSpec) -> torch.device:
    """The device that the spec asks for.

    Raises:
        UnavailableError: It asks for a GPU and there is none: never a silent fall-back.
    """
    kind, _, number = spec.device.partition(":")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = int(number or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise UnavailableError(
            f"module {spec.module!r} asks for device {spec.device!r}, and torch "
            f"{torch.__version__} sees {torch.cuda.device_count()} GPUs here",
            hint="run it where a GPU is visible, install torch for it, or set 'device: cpu'",
        )
    return torch.device("cuda", index)


def _resume(
    options: Options,
    spec: WorkerSpec,
    run: RunDir,
    step: ModuleStep,
    meter: Meter,
    chain: list[str],
) -> tuple[int, Position]:
    """Load a checkpoint where one is wanted; gives the cut and the head's position."""
    cuts = complete_cuts(run, chain)
    if options.resume == "none":
        cut = 0
    elif options.resume == "auto":
        cut = cuts[-1] if cuts else 0
    else:
        cut = int(options.resume)
    position = Position()
    if cut:
        tensors, document = checkpoint.read(run.checkpoint(cut, spec.module))
        checkpoint.restore(step, tensors, document)
        meter.progress.id = cut
        meter.progress.epoch = document["epoch"]
        meter.progress.step = document["step"]
        meter.progress.samples = document["samples"]
        if spec.head is not None:
            position = Position(**document["position"])
        log.info("module %s resumes at %d of the stream, step %d", spec.module, cut, step.batches)
    # What an earlier attempt wrote after this cut would mix with what comes now.
    checkpoint.forget(run, spec.module, lambda other: other > cut)
    return cut, position


def _connect(
    output: OutputLink,
    input: InputLink | None,
    options: Options,
    spec: WorkerSpec,
    run: RunDir,
    stop: StopRequest,
) -> None:
    """Find the neighbour downstream and shake hands; it may start later, or somewhere else.

    The neighbour upstream gets its answer meanwhile, so that only the one that is missing is named.
    """
    assert spec.downstream is not None

    def interrupted() -> bool:
        if input is not None:
            input.greet()
        return stop()

    deadline = time.monotonic() + spec.links.connect_timeout_s
    path = run.endpoint(spec.downstream)
    mistrust: EncryptionError | None = None
    while not interrupted():
        left = deadline - time.monotonic()
        record: dict[str, Any] | None = read_json(path)
        address = options.connect or (record["address"] if record is not None else None)
        if left <= 0:
            if mistrust is not None:
                raise mistrust
            where = f"at {address}" if address else f"(no endpoint in {str(path)!r})"
            raise UnavailableError(
                f"module {spec.downstream!r}, downstream of {spec.module!r}, did not answer "
                f"{where} within {spec.links.connect_timeout_s:.0f} s",
                hint=f"see its log, such as {str(run.log(spec.downstream, options.attempt))!r}",
            )
        if address is None:
            time.sleep(min(0.05, left))
            continue
        key = (record or {}).get("public_key") if options.connect is None else None
        try:
            output.connect(
                address,
                deadline_s=min(CONNECT_SLICE_S, left),
                server_key=None if key is None else key.encode(),
                stop=interrupted,
            )
        except EncryptionError as error:
            mistrust = error
            continue
        except UnavailableError:
            mistrust = None
            continue
        return


def _publish(run: RunDir, spec: WorkerSpec, attempt: int, address: str, keys: RunKeys) -> None:
    public_key = keys.own.public.decode() if encrypted(spec.links, address) else None
    write_json(
        run.endpoint(spec.module),
        {
            "module": spec.module,
            "address": address,
            "public_key": public_key,
            "attempt": attempt,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
        },
    )


def _source_root(run: RunDir) -> Path:
    """Where user data sets are imported from: the image's sources, else the run's."""
    image = Path("/opt/dni/src")
    return image if image.is_dir() else run.sources


def _read_spec(path: Path) -> WorkerSpec:
    try:
        return WorkerSpec.from_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"the module's spec cannot be read: {error}") from None
    except ValidationError as error:
        raise DataError(
            f"{str(path)!r} is not a module's spec: {error.errors()[0]['msg']}",
            hint="it was written by another version; build the images again",
        ) from None
