"""Settings of replicas: their defaults, and what they need of the rest of a chain."""

from __future__ import annotations

from collections.abc import Sequence

from dni_runtime.core.interfaces import ResolvedInterface
from dni_runtime.core.replication.base import Strategy
from dni_runtime.core.replication.compression import build_compression
from dni_runtime.core.replication.strategies import find_strategy
from dni_runtime.errors import SpecError
from dni_runtime.resolve.checks import setting_location
from dni_runtime.spec import ChainSpec
from dni_runtime.spec.choices import parse_options
from dni_runtime.spec.modules import ElasticSpec
from dni_runtime.spec.running import ReplicationSpec

HOOKED = ("bfloat16", "powersgd")
"""The compressions for which torch has a communication hook (``hooks.py``)."""

BATCHES = 32
"""Training batches of the chain from one point to the next, where nothing else is said."""


def resolve_replication(chain: ChainSpec) -> ReplicationSpec:
    """Fill in after how many batches replicas share."""
    replication, replicas = chain.replication, max(module.most for module in chain.modules)
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


def elastic_of(chain: ChainSpec) -> dict[str, int]:
    """Return the modules whose number of replicas may change, each with that at the start.

    A number that the chain file fixes may change, too: lost replicas are left out. But it stays if
    each replica has what nobody else can go on with (weights of its own), or should (the batches of
    its own data), and if replicas form a group that needs all. The replicas have been checked
    before.
    """
    if chain.replication.backend is not None:
        return {}
    fixed = chain.data.per_replica or not find_strategy(chain.replication.strategy).common
    return {
        module.name: module.most if isinstance(module.replicas, int) else module.replicas.start
        for module in chain.modules
        if module.most > 1 and not (fixed and isinstance(module.replicas, int))
    }


def check_replicas(
    chain: ChainSpec, interfaces: Sequence[ResolvedInterface | None], micro_batches: int
) -> None:
    """Refuse replicas of modules, or in chains, that cannot have them."""
    replicated = [index for index, module in enumerate(chain.modules) if module.most > 1]
    if not replicated:
        return
    _check_replication(chain.replication)
    strategy = find_strategy(chain.replication.strategy)
    for index in replicated:
        if strategy.per_step and (chain.setting(index, "accumulate") or 1) > 1:
            raise SpecError(
                f"'accumulate' and {chain.replication.strategy.name!r} exclude each other: the "
                "optimizer makes a step at each point where replicas share",
                location=setting_location(chain, index, "accumulate"),
                hint="'replication.every' is the number of batches in a step",
            )
        if isinstance(chain.modules[index].replicas, ElasticSpec):
            _check_elastic(chain, index, strategy)
    if 0 in replicated:
        _check_heads(chain)
    if chain.replication.backend is not None:
        _check_group(chain, replicated)
    if micro_batches > 1:
        raise SpecError(
            "'micro_batches' and 'replicas' exclude each other: a batch goes to one replica",
            location=("modules", replicated[0], "replicas"),
        )
    for index, interface in enumerate(interfaces):
        if interface is not None and interface.needs.max_late is not None:
            raise SpecError(
                f"module {chain.modules[index].name!r} waits for gradients "
                f"({interface.choice.name}), so it cannot give "
                f"{chain.modules[replicated[0]].name!r} several batches at once",
                location=setting_location(chain, index, "interface"),
                hint="an interface without 'max_late', such as 'mixed', or 'replicas: 1'",
            )


def _check_replication(replication: ReplicationSpec) -> None:
    """Check the names and options of a strategy and a compression."""
    strategy = find_strategy(replication.strategy)
    parse_options(strategy.Options, replication.strategy, ("replication", "strategy"))
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
                location=("replication", "compression"),
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
            location=("replication", "compression"),
            hint="leave 'compression' or 'backend' out",
        )


def _check_elastic(chain: ChainSpec, index: int, strategy: type[Strategy]) -> None:
    """Refuse a number of replicas that may change if it must stay."""
    backend = chain.replication.backend
    if backend is not None:
        why, instead = f"a group of torch.distributed ({backend!r}) needs all", "no 'backend'"
    elif not strategy.common:
        name = chain.replication.strategy.name
        why = f"with {name!r} each has weights of its own, which are lost if it leaves"
        instead = "another strategy, such as 'local-sgd'"
    else:
        return
    raise SpecError(
        f"the number of replicas cannot change: {why}",
        location=("modules", index, "replicas"),
        hint=f"'replicas: {chain.modules[index].most}', or {instead}",
    )


def _check_group(chain: ChainSpec, replicated: Sequence[int]) -> None:
    """Refuse process groups where the chain asks for what they do not do."""
    backend = chain.replication.backend
    if chain.links.security == "curve":
        raise SpecError(
            f"'links.security: curve', but {backend!r} does not encrypt what replicas share",
            location=("replication", "backend"),
            hint="leave 'backend' out, or set 'security: auto', which encrypts all other links "
            "between hosts",
        )
    on_cpu = [index for index in replicated if chain.setting(index, "device") == "cpu"]
    if backend == "nccl" and on_cpu:
        raise SpecError(
            f"{backend!r} is for GPUs, and {chain.modules[on_cpu[0]].name!r} has 'device: cpu'",
            location=setting_location(chain, on_cpu[0], "device"),
            hint="'backend: gloo', or 'device: cuda'",
        )


def _check_heads(chain: ChainSpec) -> None:
    """Refuse settings that do not work if the head has replicas."""
    data, per_replica = chain.data, chain.data.per_replica
    refused = (
        (data.workers > 0, ("data", "workers"), "batches cannot be loaded ahead if", "workers: 0"),
        (per_replica and data.streams, ("data", "streams"), "rows cannot continue from batch to "
         "batch if each batch may be of another data set, as", "streams: false"),
        (per_replica and data.labels is not None, ("data", "labels"), "the tail cannot know of "
         "which data set a batch is if", "labels: head"),
        (chain.links.on_loss == "continue", ("links", "on_loss"), "batches would be left out of "
         "the others' order if", "on_loss: wait"),
    )  # fmt: skip
    for wrong, location, why, instead in refused:
        if wrong:
            raise SpecError(
                f"{why} the head has replicas", location=location, hint=f"'{instead}', or one head"
            )
