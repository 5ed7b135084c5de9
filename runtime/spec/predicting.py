"""A trained chain that predicts: from the specs by which it trained to those by which it answers.

A *front* takes the place of the data: it sends each module the inputs of the data that it takes,
and the tail's outputs come back to it. To the others it is a worker, the first and the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from dni_runtime.spec.edge import EdgeSpec, TensorSpec
from dni_runtime.spec.worker import ExitRole, WorkerSpec

ROWS = 4096
"""Samples in the largest batch that links accept, however large those of the training were."""

FRONT = "front"
"""The name of its worker."""


def exit_name(module: str) -> str:
    """Return the name of a module's early head, beside the modules' names."""
    return f"{module}.exit"


LEAVES = TensorSpec(shape=(), dtype="uint8")
"""With a sample's prediction at an exit: whether it leaves there."""


def predicting(
    modules: Sequence[WorkerSpec],
    exits: Mapping[str, ExitRole] | None = None,
    replicas: Mapping[str, int] | None = None,
) -> tuple[WorkerSpec, ...]:
    """Return the modules' specs for a chain that only predicts, the front's before them.

    Activations travel as in training, but not as int8; labels and gradients do not. Images stay
    the same: their workers compare the hash by which the module was trained. ``exits`` are of
    modules by name: each has a link of its own to the front, which gets all samples' predictions
    there, and whether they leave; the others go on. ``replicas`` are numbers of workers, by module;
    of others there is one.
    """
    exits, replicas = exits or {}, replicas or {}
    head, tail = modules[0], modules[-1]
    if head.head is None or tail.tail is None:
        raise ValueError("these are not all modules of a chain")
    trained = [edge.number for module in modules for edge in module.sources]
    numbers = count(max(trained, default=0) + 1)
    samples = head.head.samples

    def back(module: WorkerSpec, **carries: Any) -> EdgeSpec:
        """Return a link on which answers come to the front."""
        return EdgeSpec(
            source=module.module, target=FRONT, number=next(numbers), **carries, **_PREDICTS
        )

    def inputs(module: WorkerSpec, data: tuple[int, ...]) -> EdgeSpec:
        """Return the link by which a module gets inputs of the data."""
        return EdgeSpec(
            source=FRONT,
            target=module.module,
            number=next(numbers),
            tensor=None,
            data=data,
            samples=tuple(samples[number] for number in data),
            **_PREDICTS,
        )

    early = {
        name: back(module, tensor=module.prediction, data=(0,), samples=(LEAVES,))
        for module in modules
        if (name := module.module) in exits
    }
    last = back(tail, tensor=tail.output, outputs=tail.outputs)
    # A window for all batches that are on their way: they wait for the front's answer.
    window = min(head.links.window * (len(modules) + 1), 4096)
    dtype = head.links.dtype
    if dtype in ("int8", "int8-channel"):  # by a scale that rows share, one would change others
        dtype = None
    links = head.links.model_copy(update={"window": window, "dtype": dtype})
    served = []
    for module in modules:
        data = tuple(number for edge in module.sources for number in edge.data)
        data = module.head.takes if module.head is not None else data
        sources = [_activations(edge) for edge in module.sources if edge.tensor is not None]
        sources += [inputs(module, data)] if data else []
        targets = [_activations(edge) for edge in module.targets if edge.tensor is not None]
        targets = targets or [last]
        targets += [early[module.module]] if module.module in early else []
        served.append(
            module.model_copy(
                update={
                    "trained": module.hash,
                    "sources": tuple(sources),
                    "exit": exits.get(module.module),
                    "targets": tuple(targets),
                    "head": None,
                    "tail": None,
                    "batch_limit": ROWS,
                    "max_late": None,
                    "backend": None,
                    "replicas": replicas.get(module.module, 1),
                    "elastic": {},
                    "retain": 0,
                    "links": links,
                }
            )
        )
    entries = [edge for module in served for edge in module.sources if edge.source == FRONT]
    front = served[0].model_copy(
        update={
            "module": FRONT,
            "layers": (),
            "replicas": 1,
            "sources": (*early.values(), last),
            "targets": tuple(entries),
            "outputs": (),
            "initial": False,
        }
    )
    return (front, *served)


_PREDICTS: dict[str, Any] = {
    "labelled": False,
    "gradients": 0,
    "bootstrapped": False,
    "awaited": False,
    "resend": 0,
    "predicts": True,
}


def _activations(edge: EdgeSpec) -> EdgeSpec:
    """Return a link for activations alone."""
    return edge.model_copy(update=_PREDICTS | {"data": (), "samples": (), "lanes": ()})
