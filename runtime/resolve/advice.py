"""Warnings about valid chains that will learn poorly; a measurement backs each of them."""

from __future__ import annotations

from collections.abc import Sequence

from dni_runtime.core.replication.compression import TopK
from dni_runtime.spec import WorkerSpec

_PREDICTING = frozenset({"synthetic", "mixed"})
_AT_ONCE = frozenset({*_PREDICTING, "local"})

RECIPE = (
    "groups: [{parameters: matrices, optimizer: {Muon: {lr: 0.01, adjust_lr_fn: match_rms_adamw}}}]"
)
"""What the matrices of layers with attention learn best by (measured: docs/results.md)."""


def advice(workers: Sequence[WorkerSpec]) -> list[str]:
    """Return warnings about a chain that can be trained, but will not learn as it could."""
    bare, attending, late = [], [], []
    for worker in workers:
        name = worker.interface.name if worker.interface is not None else None
        types = [type for layer in worker.layers for type in layer.types]
        if name in _PREDICTING and not any(map(_normalizes, types)):
            bare.append(worker.module)
        if name in _AT_ONCE and worker.attends:
            attending.append(worker.module)
        if name == "delayed" and worker.attends and _by_elements(worker):
            late.append(worker.module)
    warnings = []
    if bare:
        warnings.append(
            f"{_have(bare)} no normalisation (such as BatchNorm1d) in front of predicted "
            "gradients, which makes these hard to learn"
        )
    if attending:
        warnings.append(
            f"{_have(attending)} attention, which learns little from predicted gradients and local "
            "heads: leave 'interface' out to train by true ones, at most one update late"
        )
    if late:
        warnings.append(
            f"{_have(late)} late gradients of attention, of which Muon loses less than "
            f"Adam; if it is trained from random weights, in 'defaults': {RECIPE}"
        )
    if any(map(_loses_momentum, workers)):
        warnings.append(
            "'top-k' below a share of 0.05 leaves out what the momentum of 'diloco' is to gather, "
            "and training may stand still: use a larger share, 'int8', or 'local-sgd'"
        )
    return warnings + short_schedules(workers)


_ENDS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters"}
"""Schedules that are meant for a whole training, and the argument that says how long that is."""


def short_schedules(workers: Sequence[WorkerSpec]) -> list[str]:
    """Return a warning about each schedule that ends before the training."""
    short: dict[str, list[str]] = {}
    for worker in workers:
        schedule, length = worker.schedule, worker.schedule_length
        key = _ENDS.get(schedule.name, "") if schedule is not None else ""
        end = schedule.args.get(key) if schedule is not None else None
        if isinstance(end, int) and length is not None and end < length:
            unit = "batches" if worker.schedule_every == "batch" else "epochs"
            what = f"after {end} of {length} {unit}: '{key}: auto' is the whole training"
            short.setdefault(what, []).append(repr(worker.module))
    return [
        f"the schedule of module {' and '.join(modules)} ends {what}"
        for what, modules in short.items()
    ]


def _by_elements(worker: WorkerSpec) -> bool:
    """Whether Adam's kind updates each element of the matrices by itself."""
    optimizers = [worker.optimizer, *(group.optimizer for group in worker.groups)]
    names = {optimizer.name for optimizer in optimizers if optimizer is not None}
    return names <= {"Adam", "AdamW", "NAdam", "RAdam", "Adamax"}


def _loses_momentum(worker: WorkerSpec) -> bool:
    strategy, compression = worker.strategy, worker.compression
    if strategy is None or compression is None or compression.name != "top-k":
        return False
    share = TopK.Options.model_validate(compression.args).share
    return strategy.name == "diloco" and share < 0.05


def _have(modules: Sequence[str]) -> str:
    names = ", ".join(map(repr, modules))
    return f"modules {names} have" if len(modules) > 1 else f"module {names} has"


def _normalizes(type: str) -> bool:
    """Whether a layer normalises, as a transformer's layers do and a user's own may."""
    return "Norm" in type or "Transformer" in type or ":" in type or type == "Piece"
