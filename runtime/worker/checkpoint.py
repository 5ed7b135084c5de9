"""Checkpoints of one module: safetensors for tensors, JSON for the rest, each file whole or absent.

A checkpoint belongs to a *cut*: the position of its marker in the stream. A cut is complete when
every module has written its part, and all parts are of the same stream.

It is one file because what writes and what reads must agree on every name in a checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from dni_runtime import __version__
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.training import has_auto, sparse_parameters
from dni_runtime.errors import CheckpointError, DamagedError, DataError
from dni_runtime.files import is_full, opened, pinned, write_atomic
from dni_runtime.run.cuts import (
    FORMAT,
    best_cut,
    check_sum,
    complete_cuts,
    cut_folders,
    diverged_cuts,
    document_file,
    forget,
    named,
    read_document,
    reading,
    sealed,
    tensors_file,
    written_cuts,
)
from dni_runtime.run.rundir import RunDir

log = logging.getLogger(__name__)

State = tuple[dict[str, Tensor], dict[str, Any]]
"""A module's tensors by name, and the rest as a JSON document."""


def copy_state(step: ModuleStep) -> State:
    """Copy a module's whole state: weights, interface, optimizers, schedules, random numbers.

    Tensors are on the CPU, and independent of the module.
    """
    tensors = {f"layers.{k}": v for k, v in step.layers.state_dict().items()}
    if step.interface is not None:
        tensors |= {f"interface.{k}": v for k, v in step.interface.state_dict().items()}
    optimization = step.optimization
    if optimization.average is not None:
        tensors |= {f"average.{k}": v for k, v in optimization.average.state_dict().items()}
    if step.shared is not None:
        tensors |= step.shared.state()
    for index, before in enumerate(optimization.before or ()):
        tensors[f"before.{index}"] = before
    for name, p in step.layers.named_parameters():
        if p.grad is not None:  # of batches whose update is still to come
            tensors[f"gradient.{name}"] = p.grad
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "module": step.spec.module,
        "replicas": step.spec.replicas,
        "hash": step.spec.hash,
        "batches": step.batches,
        "optimizers": {},
        "gathered": optimization.gathered,
        "schedules": [schedule.state_dict() for schedule in optimization.schedules],
        "length": step.spec.schedule_length,
    }
    if optimization.scale is not None:
        document["loss_scale"] = [optimization.scale.value, optimization.scale.steps]
    if step.shared is not None:
        document["shared"] = {
            "samples": step.shared.samples,
            "asked": step.shared.strategy.asked,
        }
    for name, optimizer in _optimizers(step).items():
        state = optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{index}.{key}"] = value
                else:
                    plain.setdefault(str(index), {})[key] = value
        document["optimizers"][name] = {"state": plain, "groups": state["param_groups"]}
    tensors["random.cpu"] = torch.get_rng_state()
    if step.device.type == "cuda":
        tensors["random.device"] = torch.cuda.get_rng_state(step.device)
    return {k: _dense(v.detach().to("cpu", copy=True)) for k, v in tensors.items()}, document


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor as files hold it; sparse embeddings have sparse gradients and means."""
    return tensor.to_dense() if tensor.is_sparse else tensor.contiguous()


def restore(step: ModuleStep, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
    """Put a module into the state that :func:`copy_state` copied."""
    module, made_by = step.spec.module, document.get("version")
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint of {document.get('module')!r} was written by dni-runtime {made_by} in "
            f"format {document.get('format')!r}; this is {__version__}, which reads format "
            f"{FORMAT}",
            hint=f"continue with dni-runtime {made_by}, or start a new run with 'dnictl up'",
        )
    if document.get("module") != module:
        raise CheckpointError(
            f"the checkpoint is of module {document.get('module')!r}; this is {module!r}"
        )
    # Versions may compute the hash in different ways.
    if made_by == __version__ and document.get("hash") != step.spec.hash:
        raise CheckpointError(
            f"the checkpoint is of another spec of module {module!r} (checkpoint "
            f"{str(document.get('hash'))[:12]}, run {step.spec.hash[:12]})",
            hint="specs/ in the run directory has changed since: restore it, or start a new run "
            "with 'dnictl up'",
        )
    # What 'auto' stands for has changed: schedules and their rates are those of the new length.
    anew = has_auto(step.spec.schedule) and document.get("length") != step.spec.schedule_length
    try:
        step.layers.load_state_dict(_under(tensors, "layers."))
        if step.interface is not None:
            step.interface.load_state_dict(_under(tensors, "interface."))
        for name, optimizer in _optimizers(step).items():
            saved = document["optimizers"][name]
            state = {int(i): dict(values) for i, values in saved["state"].items()}
            for key, value in _under(tensors, f"optimizer.{name}.").items():
                index, field = key.split(".", 1)
                state.setdefault(int(index), {})[field] = value
            groups = optimizer.state_dict()["param_groups"] if anew else saved["groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        optimization = step.optimization
        if optimization.average is not None:
            optimization.average.load_state_dict(_under(tensors, "average."))
        if step.shared is not None:
            step.shared.load(tensors)
            step.shared.samples = document["shared"]["samples"]
            step.shared.strategy.asked = document["shared"]["asked"]
        before = _under(tensors, "before.")
        if before:
            parameters = enumerate(optimization.parameters)
            optimization.before = [before[str(index)].to(p.device) for index, p in parameters]
        gradients = _under(tensors, "gradient.")
        sparse = sparse_parameters(step.layers)
        for name, p in step.layers.named_parameters():
            p.grad = gradients[name].to(p.device) if name in gradients else None
            if p.grad is not None and id(p) in sparse:
                p.grad = p.grad.to_sparse(1)
        optimization.gathered = document["gathered"]
        if optimization.scale is not None:
            optimization.scale.value, optimization.scale.steps = document["loss_scale"]
        step.batches = document["batches"]
        for schedule, state in zip(optimization.schedules, document["schedules"], strict=True):
            if not anew:
                schedule.load_state_dict(_with_numbers(state))
        if anew:
            optimization.catch_up(step.batches, document["epochs_ended"])
        torch.set_rng_state(tensors["random.cpu"])
        if step.device.type == "cuda" and "random.device" in tensors:
            torch.cuda.set_rng_state(tensors["random.device"], step.device)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit module {step.spec.module!r}: {error}",
            hint="the chain has changed since; start a new run with 'dnictl up'",
        ) from None


def _with_numbers(schedule: dict[str, Any]) -> dict[str, Any]:
    """Restore numbers that are keys, which JSON makes strings: MultiStepLR's milestones."""
    return {
        key: Counter({int(k): v for k, v in value.items()})
        if key == "milestones" and isinstance(value, dict)
        else [_with_numbers(inner) for inner in value]
        if key == "_schedulers"  # of SequentialLR and ChainedScheduler
        else value
        for key, value in schedule.items()
    }


def read(path: Path) -> State:
    """Read a module's part of a checkpoint; ``path`` has no suffix.

    Raises ``CheckpointError`` if it cannot be read; ``DamagedError`` if it is missing, cut off or
    altered.
    """
    return _loaded(path, read_document(path))


def read_newest(run: RunDir, module: str) -> State | None:
    """Read a module's newest state that is not damaged: a checkpoint of any cut, or its snapshot.

    Returns None if there is none.
    """
    states: list[tuple[int, Callable[[Path], State], Path]] = []
    for cut, folder in cut_folders(run).items():
        if (folder / f"{module}.json").exists():
            states.append((cut, read, folder / module))
    stem = run.snapshot(module).with_suffix("")
    problem: CheckpointError | None = None
    if run.snapshot(module).exists():
        try:
            states.append((_snapshot_document(stem)["cut"], _read_snapshot, stem))
        except CheckpointError as error:
            problem = error
            log.warning("%s; an older state is used", error)
    for _, read_it, path in sorted(states, key=lambda state: state[0], reverse=True):
        try:
            return read_it(path)
        except CheckpointError as error:
            problem = error
            log.warning("%s; an older state is used", error)
    if problem is not None:
        raise problem
    return None


def _read_snapshot(path: Path) -> State:
    return _loaded(path, _snapshot_document(path))


def _loaded(path: Path, document: dict[str, Any]) -> State:
    with reading(path), opened(tensors_file(path)) as file:
        data = file.read()
    check_sum(path, io.BytesIO(data), document)
    with _parsing(path):
        return load(data), document


def _snapshot_document(path: Path) -> dict[str, Any]:
    part = tensors_file(path)
    with reading(path), _parsing(path), pinned(part) as name, safe_open(name, "pt") as file:
        document: dict[str, Any] = json.loads(file.metadata()["document"])
        return document


@contextlib.contextmanager
def _parsing(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{named(path)} is damaged: {error}") from None


def write_part(
    run: RunDir,
    module: str,
    state: State,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a module's part of a checkpoint; the state's document says at which ``cut``.

    ``progress`` is told of bytes that are on disk.
    """
    tensors, document = state
    path = run.checkpoint(document["cut"], module)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = save(tensors)
    write_atomic(tensors_file(path), data, progress=progress)
    # The JSON comes last: if it exists, the checkpoint is whole.
    text = sealed(data, document | {"bytes": len(data)})
    write_atomic(document_file(path), text + "\n")


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, so that training does not wait for the disk.

    ``chain`` has the names of all workers, if this one removes old cuts: the tail, which writes
    last, and the head, which exits last. It is empty for others: a thousand modules need not scan
    each other's parts. If a checkpoint cannot be written, the last good one stays.
    """

    def __init__(
        self,
        run: RunDir,
        module: str,
        chain: list[str],
        keep: int,  # complete cuts
        on_error: Callable[[CheckpointError], None],  # called in the thread
        on_written: Callable[[], None] = lambda: None,  # likewise
    ) -> None:
        self._run = run
        self._module = module
        self._chain = chain
        self._keep = keep
        self._on_error = on_error
        self._on_written = on_written
        self._complete: list[int] = []
        # of the newest checkpoint; None if it was written
        self.failure: CheckpointError | None = None
        self.saved_bytes = 0  # also of a file that is not complete yet
        self._queue: queue.Queue[tuple[State, bool] | None]
        self._queue = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something is being written, or is queued."""
        return self._queue.unfinished_tasks > 0

    def write(self, cut: int, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
        """Queue a checkpoint; wait only while the one before the last is being written."""
        self._queue.put(((tensors, document | {"cut": cut}), True))

    def write_snapshot(
        self, cut: int, tensors: dict[str, Tensor], document: dict[str, Any]
    ) -> None:
        """Queue the module's own snapshot, which replaces the previous one and is not a cut."""
        self._queue.put(((tensors, document | {"cut": cut}), False))

    def flush(self) -> None:
        """Wait until everything queued is on disk, or has failed."""
        self._queue.join()

    def close(self) -> None:
        """Wait until everything is on disk, then remove old cuts: at the head all parts exist."""
        self._queue.put(None)
        self._thread.join()
        self._drop_old()

    def _count(self, written: int) -> None:
        self.saved_bytes += written

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            (tensors, document), is_cut = job
            cut = document["cut"]
            try:
                if is_cut:
                    write_part(self._run, self._module, (tensors, document), self._count)
                    self.failure = None
                    log.info("checkpoint at %d written", cut)
                    self._drop_old()
                else:
                    metadata = {"document": sealed(save(tensors), document)}
                    data = save(tensors, metadata)
                    write_atomic(self._run.snapshot(self._module), data, progress=self._count)
                if self.failure is None:  # a snapshot does not replace a failed checkpoint
                    self._on_written()
            except Exception as error:  # without this thread the worker would wait for ever
                what = "checkpoint" if is_cut else "snapshot"
                failure = CheckpointError(
                    f"the {what} at {cut} could not be written: {error or repr(error)}",
                    hint=self._newest() + ("; make room on the disk" if is_full(error) else ""),
                )
                if is_cut:
                    self.failure = failure
                self._on_error(failure)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _newest(self) -> str:
        """Say what is kept of the module's state, if a newer one cannot be written."""
        try:
            if cuts := written_cuts(self._run, [self._module]):
                return f"the checkpoint at {cuts[-1]} is kept"
            if self._run.snapshot(self._module).exists():
                return "the last snapshot is kept"
        except OSError:  # the file system is not available
            return "what is there is kept"
        return "there is no earlier one"

    def _drop_old(self) -> None:
        if not self._chain:
            return
        try:
            complete = self._complete = complete_cuts(self._run, self._chain, self._complete)
            oldest = complete[-self._keep] if len(complete) >= self._keep else 0
            kept = best_cut(self._run)
            useless = diverged_cuts(self._run, self._chain, complete)[:-1]
            forget(self._run, self._chain, lambda c: (c < oldest and c != kept) or c in useless)
        except (OSError, CheckpointError, DataError) as error:  # the new one is written
            log.warning("old checkpoints could not be removed: %s", error)


def _optimizers(step: ModuleStep) -> dict[str, torch.optim.Optimizer]:
    optimizers = dict(step.optimization.optimizers)
    for name, layer in step.layers.named_modules():
        if isinstance(layer, Recurrent):
            optimizers |= {
                f"layers.{name}.{key}": optimizer for key, optimizer in layer.optimizers().items()
            }
    return optimizers if step.interface is None else optimizers | step.interface.optimizers()


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
