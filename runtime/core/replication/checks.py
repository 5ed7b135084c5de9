"""What replicas of modules need of the rest of a chain: checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from dni_runtime.core.checks import place
from dni_runtime.core.interfaces import Resolved
from dni_runtime.core.replication.registry import check_replication, find_strategy
from dni_runtime.errors import SpecError
from dni_runtime.spec import ChainSpec
from dni_runtime.spec.modules import ElasticSpec


def elastic_of(chain: ChainSpec) -> dict[str, int]:
    """Return the modules whose number of replicas may change, each with that at the start.

    A number that the chain file fixes may, too: replicas that are lost are left out. But it stays
    where each replica has what nobody else can go on with (weights of its own), or should (the
    batches of its own data).

    Args:
        chain: The chain; its replicas have been checked.
    """
    fixed = chain.data.own or not find_strategy(chain.replication.strategy).common
    return {
        one.name: one.most if isinstance(one.replicas, int) else one.replicas.start
        for one in chain.modules
        if one.most > 1 and not (fixed and isinstance(one.replicas, int))
    }


def check_replicas(
    chain: ChainSpec, interfaces: Sequence[Resolved | None], micro_batches: int
) -> None:
    """Refuse replicas of modules, or in chains, where they do not work.

    Args:
        chain: The chain as written.
        interfaces: The gradient interface of each module; None for the tail.
        micro_batches: Parts that each training batch is cut into.

    Raises:
        SpecError: The head has replicas that cannot share its data, a module waits for gradients,
            batches come in parts, or the strategy is unknown.
    """
    replicated = [index for index, module in enumerate(chain.modules) if module.most > 1]
    if not replicated:
        return
    check_replication(chain.replication)
    strategy = find_strategy(chain.replication.strategy)
    for index in replicated:
        if strategy.per_step and (chain.setting(index, "accumulate") or 1) > 1:
            raise SpecError(
                f"'accumulate' and {chain.replication.strategy.name!r} exclude each other: the "
                "optimizer makes a step at each point where replicas share",
                location=place(chain, index, "accumulate"),
                hint="'replication.every' is the number of batches in a step",
            )
        if not strategy.common and isinstance(chain.modules[index].replicas, ElasticSpec):
            raise SpecError(
                f"with {chain.replication.strategy.name!r} each replica has weights of its own, "
                "which are lost if it leaves",
                location=("modules", index, "replicas"),
                hint=f"'replicas: {chain.modules[index].most}', or another strategy, such as "
                "'local-sgd'",
            )
    if 0 in replicated:
        _check_heads(chain)
    if micro_batches > 1:
        raise SpecError(
            "'micro_batches' and 'replicas' exclude each other: a batch goes to one replica",
            location=("modules", replicated[0], "replicas"),
        )
    for index, interface in enumerate(interfaces):
        if interface is not None and interface.wanted.max_late is not None:
            raise SpecError(
                f"module {chain.modules[index].name!r} waits for gradients "
                f"({interface.choice.name}), so it cannot give "
                f"{chain.modules[replicated[0]].name!r} several batches at once",
                location=place(chain, index, "interface"),
                hint="an interface without 'max_late', such as 'mixed', or 'replicas: 1'",
            )


def _check_heads(chain: ChainSpec) -> None:
    """Refuse settings that do not work if the head has replicas."""
    data, own = chain.data, chain.data.own
    refused = (
        (data.workers > 0, ("data", "workers"), "batches cannot be loaded ahead if", "workers: 0"),
        (own and data.streams, ("data", "streams"), "rows cannot continue from batch to batch if "
         "each batch may be of another data set, as", "streams: false"),
        (own and data.labels is not None, ("data", "labels"), "the tail cannot know of which data "
         "set a batch is if", "labels: head"),
        (chain.links.on_loss == "continue", ("links", "on_loss"), "batches would be left out of "
         "the others' order if", "on_loss: wait"),
    )  # fmt: skip
    for wrong, location, why, instead in refused:
        if wrong:
            raise SpecError(
                f"{why} the head has replicas", location=location, hint=f"'{instead}', or one head"
            )
