"""Strategies and compressions by name; users name theirs by import path."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dni_runtime.core.choices import Location, find_class, parse_options
from dni_runtime.core.replication.admm import Admm
from dni_runtime.core.replication.all_reduce import AllReduce
from dni_runtime.core.replication.base import Strategy
from dni_runtime.core.replication.codistillation import Codistillation
from dni_runtime.core.replication.compression import (
    Bfloat16,
    Compression,
    Int8,
    PowerSgd,
    TopK,
)
from dni_runtime.core.replication.diloco import DiLoCo
from dni_runtime.core.replication.dynamic import Dynamic
from dni_runtime.core.replication.federated import Federated
from dni_runtime.core.replication.local_sgd import LocalSgd
from dni_runtime.core.replication.parameter_server import ParameterServer
from dni_runtime.errors import SpecError
from dni_runtime.spec import ChainSpec, Choice
from dni_runtime.spec.running import ReplicationSpec

STRATEGIES: dict[str, type[Strategy]] = {
    "local-sgd": LocalSgd,
    "all-reduce": AllReduce,
    "diloco": DiLoCo,
    "federated": Federated,
    "dynamic": Dynamic,
    "admm": Admm,
    "codistillation": Codistillation,
    "parameter-server": ParameterServer,
}
COMPRESSIONS: dict[str, type[Compression]] = {
    "bfloat16": Bfloat16,
    "int8": Int8,
    "top-k": TopK,
    "powersgd": PowerSgd,
}

HOOKED = ("bfloat16", "powersgd")
"""The compressions for which torch has a communication hook (``hooks.py``)."""

BATCHES = 32
"""Training batches of the chain from one point to the next, where nothing else is said."""

_STRATEGY: Location = ("replication", "strategy")
_COMPRESSION: Location = ("replication", "compression")


def find_strategy(choice: Choice) -> type[Strategy]:
    """Return the class of a strategy."""
    return find_class(choice.name, "strategy", STRATEGIES, Strategy, _STRATEGY)


def resolve_replication(chain: ChainSpec) -> ReplicationSpec:
    """Fill in after how many batches replicas share."""
    replication, replicas = chain.replication, max(one.most for one in chain.modules)
    if replication.every is not None:
        return replication
    per_step = replicas > 1 and find_strategy(replication.strategy).per_step
    return replication.model_copy(update={"every": replicas if per_step else BATCHES})


def lr_scale(replication: ReplicationSpec) -> float:
    """Return the factor of learning rates; ``every`` has been filled in."""
    if replication.scale_lr is None:
        return 1.0
    batches = float(replication.every or 1)
    return batches if replication.scale_lr == "linear" else batches**0.5


def check_replication(replication: ReplicationSpec) -> None:
    """Check the names and options of a strategy and a compression."""
    strategy = find_strategy(replication.strategy)
    parse_options(strategy.Options, replication.strategy, _STRATEGY)
    if replication.scale_lr is not None and not strategy.per_step:
        raise SpecError(
            f"'scale_lr' is for a step with the mean gradient of several batches; with "
            f"{replication.strategy.name!r} each replica makes a step for each batch of its own",
            location=("replication", "scale_lr"),
            hint="leave 'scale_lr' out, and try a higher 'lr' of the optimizer; or choose "
            "'all-reduce'",
        )
    if replication.compression is not None:
        if not (strategy.waits and strategy.common):
            raise SpecError(
                f"'compression' needs a row that all had last, which {replication.strategy.name!r} "
                "has not",
                location=_COMPRESSION,
                hint="leave 'compression' out, or choose another strategy, such as 'local-sgd'",
            )
        build_compression(replication.compression, ())
    if replication.backend is not None:
        _check_backend(replication, strategy)


def _check_backend(replication: ReplicationSpec, strategy: type[Strategy]) -> None:
    """Refuse what a group of torch.distributed cannot do."""
    backend, compression = replication.backend, replication.compression
    if not (strategy.waits and strategy.common):
        raise SpecError(
            f"'backend: {backend}' averages what all offer at the same time, and "
            f"{replication.strategy.name!r} has no such mean",
            location=("replication", "backend"),
            hint="leave 'backend' out, or choose another strategy, such as 'all-reduce'",
        )
    if compression is not None and not (strategy.per_step and compression.name in HOOKED):
        raise SpecError(
            f"with 'backend: {backend}' torch's communication hooks compress, which are for the "
            f"gradients of 'all-reduce': {' and '.join(HOOKED)}",
            location=_COMPRESSION,
            hint="leave 'compression' or 'backend' out",
        )


def build_strategy(choice: Choice, start_P: Tensor) -> Strategy:
    """Make a strategy that begins with these parameters."""
    cls = find_strategy(choice)
    return cls(parse_options(cls.Options, choice, _STRATEGY), start_P)


def build_compression(choice: Choice, shapes: Sequence[Sequence[int]]) -> Compression:
    """Make a compression of tensors of these sizes."""
    cls = find_class(choice.name, "compression", COMPRESSIONS, Compression, _COMPRESSION)
    made: Compression = cls(parse_options(cls.Options, choice, _COMPRESSION), shapes)
    return made
