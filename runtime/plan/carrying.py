"""A run that goes on where another one was stopped, with its layers cut elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dni_runtime.core.layers import tensors_of
from dni_runtime.errors import UsageError
from dni_runtime.plan.prepare import CheckedChain, Origin, importing_from
from dni_runtime.run.cuts import choose_cut, read_document
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker.carry import Names, carry
from dni_runtime.worker.checkpoint import read, write_part

_OF_THE_STREAM = ("dataset", "batch_size", "shuffle", "streams", "train_limit", "validation")
"""Settings of the data that say which samples a batch has."""


def carry_over(prepared: CheckedChain, record: Record, state: RunState) -> CheckedChain:
    """Have a chain's next run go on from the newest checkpoint of a run with the same layers.

    ``state`` is that run's.
    """
    record.compare_versions()
    name = record.name
    if state.active:
        raise UsageError(
            f"run {name!r} is {state.phase}", hint=f"stop it first: dnictl stop {name}"
        )
    cut, _ = choose_cut(record.run, record.modules, "newest")
    if read_document(record.run.checkpoint(cut, record.modules[0])).get("over"):
        raise UsageError(
            f"run {name!r} has finished: there is nothing to go on with",
            hint="to start from its weights, name its directory as 'init.file'",
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
        parts = carry(its.specs()[1], states, prepared.workers)
        replicas = replicas_of([worker.module for worker in prepared.replicas])
        for workers, (tensors, document) in zip(replicas.values(), parts, strict=True):
            for worker in workers:
                write_part(run, worker, (tensors, document | {"module": worker}))


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
