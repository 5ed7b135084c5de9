"""A run that goes on where another one has ended: with other settings, or with more epochs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dni_runtime.core.layers import tensors_of
from dni_runtime.errors import StoppedError, UsageError
from dni_runtime.files import write_atomic, write_json
from dni_runtime.plan.prepare import CheckedChain, Origin, importing_from
from dni_runtime.run.cuts import (
    choose_cut,
    document_file,
    newest_cut,
    parts_of,
    read_document,
    sealed,
    tensors_file,
)
from dni_runtime.run.documents.events import Event
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker.carry import Names, carry
from dni_runtime.worker.checkpoint import read, write_part
from dni_runtime.worker.stream import Position

_OF_THE_STREAM = ("dataset", "batch_size", "shuffle", "streams", "train_limit", "validation")
"""Settings of the data that say which samples a batch has."""


def carry_over(prepared: CheckedChain, record: Record, state: RunState) -> CheckedChain:
    """Have a chain's next run go on from the newest checkpoint of a run with the same layers.

    ``state`` is that run's.
    """
    record.check_no_release()
    record.compare_versions()
    name = record.name
    if state.active:
        raise UsageError(
            f"run {name!r} is {state.phase}", hint=f"stop it first: dnictl stop {name}"
        )
    cut, _ = choose_cut(record.run, record.modules, "newest")
    if _complete(prepared.chain, record, cut):
        raise UsageError(
            f"run {name!r} has finished what the chain asks for: there is nothing to go on with",
            hint=f"raise 'epochs' or 'steps' in {str(prepared.path)!r}; to start from its weights "
            "instead, name its directory as 'init.file'",
        )
    chain, workers = record.specs()
    for key in _OF_THE_STREAM:
        was, now = getattr(chain.data, key), getattr(prepared.chain.data, key)
        if was != now:
            raise UsageError(
                f"{prepared.locate('data', key)} is {now!r}, and was {was!r} in run {name!r}, "
                "which stopped in the midst of its data"
            )
    with importing_from(prepared.base.absolute()):
        _check_layers(_shapes(workers), _shapes(prepared.workers), name)
    return replace(prepared, carried=Origin(record, cut))


def write_carried(run: RunDir, prepared: CheckedChain) -> None:
    """Write the checkpoint that a new run begins with."""
    assert prepared.carried is not None
    its, cut = prepared.carried.record, prepared.carried.cut
    first = (workers[0] for workers in replicas_of(its.modules).values())
    states = (read(its.run.checkpoint(cut, worker)) for worker in first)
    with importing_from(prepared.base.absolute()):
        parts = (
            (tensors, going_on(document, its.batches_per_epoch))
            for tensors, document in carry(its.specs()[1], states, prepared.workers)
        )
        replicas = replicas_of([worker.module for worker in prepared.replicas])
        for workers, (tensors, document) in zip(replicas.values(), parts, strict=True):
            for worker in workers:
                write_part(run, worker, (tensors, document | {"module": worker}))


def extend(record: Record, epochs: int) -> Record:
    """Let a run that has ended train until it has so many epochs in all; return its new record.

    If it has finished, it is one that was stopped from then on. The caller owns it. What is done in
    part, because this process was killed, is done whole by another call.
    """
    run, workers = record.run, record.specs()[1]
    state = RunState.read(run)
    if epochs == record.epochs and state.phase != "finished":
        return record
    cut, _ = newest_cut(run, record.modules)
    chain = longer(record, epochs)
    lengths = {
        worker.module: chain.length(worker.schedule_every, record.batches_per_epoch)
        for worker in workers
    }
    for worker in record.modules:
        spec = WorkerSpec.from_json(run.spec(worker).read_bytes())
        head = spec.head and spec.head.model_copy(update={"epochs": epochs})
        update = {"head": head, "length": lengths[module_of(worker)]}
        write_atomic(run.spec(worker), spec.model_copy(update=update).to_json())
    write_json(run.chain, chain.model_dump(mode="json"))
    total = chain.total_batches(record.batches_per_epoch)
    record.model_copy(update={"epochs": epochs, "total_steps": total}).write(run.record)
    for worker in parts_of(run, cut, record.modules) if cut else ():
        part = run.checkpoint(cut, worker)
        document = going_on(read_document(part), record.batches_per_epoch)
        text = sealed(tensors_file(part).read_bytes(), document)
        write_atomic(document_file(part), text + "\n")
    event = {"time": time.time(), "event": "run_extended", "epochs": epochs}
    Event.model_validate(event).append(run.events)
    for worker in record.modules:  # from which mpi's state follows
        report = Report.read(run.worker(worker))
        if report.state == "finished":
            report.model_copy(update={"state": "stopped"}).write(run.worker(worker))
    if state.phase == "finished":
        state.phase, state.exit_code = "stopped", StoppedError.exit_code
        for module in state.modules.values():
            module.state = "stopped" if module.state == "finished" else module.state
        state.write(run)
    return Record.read(run.root)


def longer(record: Record, epochs: int) -> ChainSpec:
    """Return a run's chain with so many epochs; refuse as many as it has trained, or fewer."""
    run, name = record.run, record.name
    chain, cut = record.specs()[0], newest_cut(run, record.modules)[0]
    if chain.steps is not None:
        raise UsageError(
            f"run {name!r} ends after 'steps: {chain.steps}', not by its epochs",
            hint=f"raise 'steps' in the chain, then 'dnictl up --carry {name}'",
        )
    chain = chain.model_copy(update={"epochs": epochs})
    if _complete(chain, record, cut):
        trained = read_document(run.checkpoint(cut, record.modules[0]))["epochs_ended"]
        raise UsageError(
            f"run {name!r} has trained {trained} epochs: {epochs} epochs in all add none",
            hint=f"for example: dnictl resume {name} --epochs {2 * trained}",
        )
    return chain


def _complete(chain: ChainSpec, record: Record, cut: int) -> bool:
    """Whether a run's checkpoint is at the end of what a chain asks for."""
    if not cut:
        return False
    document = read_document(record.run.checkpoint(cut, record.modules[0]))
    total = chain.total_batches(record.batches_per_epoch)
    if total is None:
        return bool(document["epochs_ended"] >= chain.epochs)
    return bool(document["position"]["step"] >= total)


def going_on(document: Mapping[str, Any], per_epoch: int | None) -> dict[str, Any]:
    """Return the document of a part of a checkpoint for a stream that does not end there."""
    made = {**document, "over": False}
    if "position" not in made or (at := Position(**made["position"])).phase in ("train", "eval"):
        return made
    # It may have ended early, or by its number of steps: then the epoch goes on.
    whole = document["epochs_ended"] >= at.epoch and (per_epoch is None or at.batch >= per_epoch)
    at = at.next_epoch() if whole else replace(at, phase="train", eval_batch=0)
    made.pop("again", None)  # it ends with the end
    return made | {"position": at.to_dict()}


def _shapes(workers: tuple[WorkerSpec, ...]) -> dict[str, list[int]]:
    names = Names(workers)
    return {
        names.of(number, name): list(shape)
        for number, worker in enumerate(workers)
        for name, shape in tensors_of(worker).items()
    }


def _check_layers(old: Mapping[str, list[int]], new: Mapping[str, list[int]], run: str) -> None:
    for name in [*new, *old]:
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        if was is None or now is None:
            what = f"{name!r} is {'new' if was is None else 'missing'}"
        else:
            what = f"{name!r} has shape {now} instead of {was}"
        raise UsageError(
            f"the chain's layers are not those of run {run!r}: {what}",
            hint="to start from some of its weights, name its directory as 'init.file'",
        )
