"""The state of a chain for another chain of the same layers, cut elsewhere.

Weights, averages, gradients and the optimizers' state go by the names that they have in the whole
network: ``Piece`` has the network's own, and another layer is counted from the head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.step import ModuleStep
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.checkpoint import State, restore, snapshot

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
            tensors, document = snapshot(step)
            document |= {key: like.document[key] for key in _SAME}
            if worker.head is not None:
                first = modules[0].document
                document |= {key: first[key] for key in _HEADS if key in first}
            yield tensors, document


class _Module:
    """A module of the checkpoint."""

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
