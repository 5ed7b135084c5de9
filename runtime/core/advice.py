"""What a valid chain's author should know before training it; each piece has a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dni_runtime.spec import LayerSpec, WorkerSpec

PREDICTING = frozenset({"synthetic", "mixed"})


def advice(workers: Sequence[WorkerSpec]) -> list[str]:
    """Warnings about a chain that can be trained, but will not learn as well as it could."""
    bare = [
        worker.module
        for worker in workers
        if worker.interface is not None
        and worker.interface.name in PREDICTING
        and not _normalizes(worker.layers)
    ]
    if not bare:
        return []
    names = ", ".join(repr(name) for name in bare)
    which = f"modules {names} have" if len(bare) > 1 else f"module {names} has"
    return [
        f"{which} no normalisation (such as BatchNorm1d) in front of predicted gradients, which "
        "then are hard to learn (docs/results.md, Normalisation)"
    ]


def _normalizes(layers: Iterable[LayerSpec]) -> bool:
    """Whether one of the layers normalises; a user's class may, and a transformer's layers do."""
    return any(
        "Norm" in layer.type
        or "Transformer" in layer.type
        or ":" in layer.type
        or _normalizes(layer.layers)
        or _normalizes(layer.shortcut)
        for layer in layers
    )
