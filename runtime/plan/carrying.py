"""A run that goes on where another one has ended: with other settings, cuts, or more epochs.

Weights, averages, gradients and the optimizers' state go by the names that they have in the whole
network: ``Piece`` has the network's own, and another layer is counted from the head.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch.optim import Optimizer

from dni_runtime.core.layers import tensors_of
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import StoppedError, UsageError
from dni_runtime.files import opened, write_atomic, write_json
from dni_runtime.plan.prepare import CheckedChain, Origin, importing_from
from dni_runtime.run.cuts import (
    choose_cut,
    document_file,
    newest_cut,
    parts_of,
    read_document,
    sealed,
    tensors_file,
    verify,
)
from dni_runtime.run.documents.events import Event
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker.checkpoint import State, copy_state, read, restore, write_part
from dni_runtime.worker.stream import Position

_OF_THE_STREAM = (
    "dataset", "batch_size", "drop_last", "shuffle", "streams", "train_limit", "validation",
)  # fmt: skip
"""Settings of the data that say, with the seed, which samples a batch has."""


def carry_over(prepared: CheckedChain, record: Record, state: RunState) -> CheckedChain:
    """Have a chain's next run go on from the newest checkpoint of a run with the same layers."""
    record.check_no_release()
    record.compare_versions()
    name = record.name
    if state.active:
        raise UsageError(
            f"run {name!r} is {state.phase}", hint=f"stop it first: dnictl stop {name}"
        )
    cut = choose_cut(record.run, record.modules, "newest")
    if _complete(prepared.chain, record, cut):
        raise UsageError(
            f"run {name!r} has finished what the chain asks for: there is nothing to go on with",
            hint=f"raise 'epochs' or 'steps' in {str(prepared.path)!r}; to start from its weights "
            "instead, name its directory as 'init.file'",
        )
    chain, workers = record.specs()
    for place in (("seed",), *(("data", key) for key in _OF_THE_STREAM)):
        was, now = (reduce(getattr, place, one) for one in (chain, prepared.chain))
        if was != now:
            raise UsageError(
                f"{prepared.locate(*place)} is {now!r}, and was {was!r} in run {name!r}, "
                "whose place in the data is that of other batches"
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
    if cut:
        verify(run, cut, record.modules)
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
        with opened(tensors_file(part)) as file:
            write_atomic(document_file(part), sealed(file.read(), document) + "\n")
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
        state.save(run)
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
            f"run {name!r} has trained up to epoch {trained}: 'epochs: {epochs}' adds none",
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


_SAME = ("cut", "epoch", "epochs_ended", "step", "samples", "counted", "over")
_HEADS = ("position", "again")
"""What a part's document says of the stream: of every module, and of the head."""


class Names:
    """What the tensors of a chain's modules, head first, are called in the whole network."""

    def __init__(self, workers: Sequence[WorkerSpec]) -> None:
        # of each module: the cut after it, as layers up to it and the network's own module
        self.ends: list[tuple[int, str | None]] = []
        self._prefixes: list[list[str]] = []
        count = 0
        for worker in workers:
            prefixes, until = list[str](), None
            for layer in worker.layers:
                piece = layer.type == "Piece"
                prefixes.append("piece" if piece else str(count))
                count += not piece
                until = layer.args.get("until") if piece else until
            self._prefixes.append(prefixes)
            self.ends.append((count, until))

    def of(self, module: int, key: str) -> str:
        """Return the name of what is called ``key`` among the layers of a module."""
        number, _, rest = key.partition(".")
        return f"{self._prefixes[module][int(number)]}.{rest}"


def carry(
    old: Sequence[WorkerSpec], states: Iterable[State], new: Sequence[WorkerSpec]
) -> Iterator[State]:
    """Make the parts of a checkpoint, in order, for modules with other cuts and the same layers.

    What the new chain sets, such as optimizers and learning rates, counts. An optimizer of another
    class, and the interface of a new cut, start without a state. All modules are given head first.
    """
    with torch.random.fork_rng(devices=[]):
        names = Names(old)
        modules = []
        for number, (worker, state) in enumerate(zip(old, states, strict=True)):
            modules.append(_Module(ModuleStep(worker), state, names.ends[number]))
        by_name = {
            names.of(number, key): (module, key)
            for number, module in enumerate(modules)
            for key in module.tensors
        }
        names = Names(new)
        for number, worker in enumerate(new):
            step = ModuleStep(worker)
            like = modules[min(number, len(modules) - 1)]
            its = {key: by_name[names.of(number, key)] for key in step.layers.state_dict()}
            _take_layers(step, its, like)
            _take_recurrent(step, its)
            for module in modules:
                if module.end == names.ends[number]:
                    _take_interface(step, module.step)
            torch.set_rng_state(like.random)
            tensors, document = copy_state(step)
            document |= {key: like.document[key] for key in _SAME}
            if worker.head is not None:
                first = modules[0].document
                document |= {key: first[key] for key in _HEADS if key in first}
            yield tensors, document


class _Module:
    def __init__(self, step: ModuleStep, state: State, end: tuple[int, str | None]) -> None:
        restore(step, *state)
        self.step, self.document, self.end = step, state[1], end
        self.random = torch.get_rng_state()
        # by the module's own names; the averages are the tensors themselves if none are kept
        self.tensors = self.averages = step.layers.state_dict()
        optimization = step.optimization
        if optimization.average is not None:
            self.averages = optimization.average.module.state_dict()
        self.parameters = dict(step.layers.named_parameters(remove_duplicate=False))
        before = dict(
            zip(map(id, optimization.parameters), optimization.before or (), strict=False)
        )
        # parameters before the newest update, if weights are predicted
        self.before = {key: before[id(p)] for key, p in self.parameters.items() if id(p) in before}
        owner = {
            id(p): optimizer
            for optimizer in optimization.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self.optimizers: dict[str, Optimizer] = {
            key: owner[id(p)] for key, p in self.parameters.items() if id(p) in owner
        }  # of each trained parameter


def _take_layers(step: ModuleStep, its: dict[str, tuple[_Module, str]], like: _Module) -> None:
    """Take weights, and all that belongs to one of them.

    ``its`` has, for each of the new module's tensors, the module that had it, and that one's name
    for it. ``like`` is a module as far in the stream.
    """
    optimization, average = step.optimization, step.optimization.average
    step.layers.load_state_dict({key: old.tensors[name] for key, (old, name) in its.items()})
    if average is not None:
        average.module.load_state_dict(
            {key: old.averages[name] for key, (old, name) in its.items()}
        )
        theirs = like.step.optimization.average
        average.n_averaged.fill_(1 if theirs is None else int(theirs.n_averaged))
    names = {id(p): key for key, p in step.layers.named_parameters()}
    ours = [its[names[id(p)]] for p in optimization.parameters]
    if ours and all(name in old.before for old, name in ours):
        optimization.before = [old.before[name] for old, name in ours]
    for p, (old, name) in zip(optimization.parameters, ours, strict=True):
        p.grad = old.parameters[name].grad
    for optimizer in optimization.optimizers.values():
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            old, name = its[names[id(p)]]
            its_own = old.optimizers.get(name)
            if type(its_own) is type(optimizer) and old.parameters[name] in its_own.state:
                optimizer.state[p] = copy.deepcopy(its_own.state[old.parameters[name]])
    step.batches, optimization.gathered = like.step.batches, like.step.optimization.gathered
    optimization.catch_up(step.batches, like.document["epochs_ended"])


def _take_recurrent(step: ModuleStep, its: dict[str, tuple[_Module, str]]) -> None:
    """Take the state of the optimizers that recurrent layers have."""
    for path, layer in step.layers.named_modules():
        if isinstance(layer, Recurrent):
            key = next(key for key in its if key.startswith(f"{path}."))
            old, name = its[key]
            theirs = old.step.layers.get_submodule(name.removesuffix(key.removeprefix(path)))
            assert isinstance(theirs, Recurrent)
            for cell, optimizer in layer.optimizers().items():
                optimizer.load_state_dict(theirs.optimizers()[cell].state_dict())


def _take_interface(step: ModuleStep, old: ModuleStep) -> None:
    """Take the interface of the module that ended at the same cut, if it was the same."""
    if step.interface is None or old.interface is None:
        return
    ours, theirs = step.spec, old.spec
    if (ours.interface, ours.output) == (theirs.interface, theirs.output):
        step.interface.load_state_dict(old.interface.state_dict())
        for key, optimizer in step.interface.optimizers().items():
            optimizer.load_state_dict(old.interface.optimizers()[key].state_dict())
