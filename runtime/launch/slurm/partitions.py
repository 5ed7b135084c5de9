"""Placement of modules in different partitions, each with its own nodes (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dni_runtime.errors import UsageError
from dni_runtime.launch.placement import Capacity, place
from dni_runtime.launch.plan import Need
from dni_runtime.spec.machines import PlacementSpec

Partition = str | None


def place_in_partitions(
    needs: Sequence[Need],
    wanted: PlacementSpec,
    partitions: Sequence[Partition],
    nodes: Mapping[Partition, Capacity],
) -> tuple[tuple[int, ...], tuple[Partition, ...]]:
    """Place each module on a node, and each node in a partition.

    Args:
        needs: The modules, head first.
        wanted: The strategy and the total number of nodes.
        partitions: The partition of each module.
        nodes: Resources of a node of each partition, if known.

    Returns:
        For each module the number of its node, as from ``place``, and for each node its partition.
        The head's partition comes first, and nodes of one partition are contiguous: nodes of an
        explicit map are renumbered if necessary.

    Raises:
        UsageError: The modules cannot be placed; says why.
    """
    members: dict[Partition, list[int]] = {}
    for index, partition in enumerate(partitions):
        members.setdefault(partition, []).append(index)
    if len(members) == 1:
        placed = place(needs, wanted, node=nodes.get(partitions[0]))
        return placed, (partitions[0],) * (max(placed) + 1)
    if wanted.strategy == "explicit":
        shares = _explicit(needs, wanted, members)
    else:
        shares = _shares(needs, wanted, members)
    placed_at = [0] * len(needs)
    node_partitions: list[Partition] = []
    for partition, share in shares.items():
        inside = members[partition]
        block = place([needs[index] for index in inside], share, node=nodes.get(partition))
        for index, node in zip(inside, block, strict=True):
            placed_at[index] = len(node_partitions) + node
        node_partitions += [partition] * (max(block) + 1)
    return tuple(placed_at), tuple(node_partitions)


def _shares(
    needs: Sequence[Need], wanted: PlacementSpec, members: Mapping[Partition, Sequence[int]]
) -> dict[Partition, PlacementSpec]:
    """Assign one node to each partition, each further node where a node has the most work."""
    total = len(members) if wanted.nodes is None else wanted.nodes
    if not len(members) <= total <= len(needs):
        names = ", ".join(str(partition or "default") for partition in members)
        raise UsageError(
            f"'nodes' is {total}, but {len(needs)} modules in {len(members)} partitions "
            f"({names}) need {len(members)} to {len(needs)}",
            hint="set --nodes, or 'placement.nodes' in the chain",
        )
    work = {at: sum(needs[index].cost for index in inside) for at, inside in members.items()}
    counts = dict.fromkeys(members, 1)
    for _ in range(total - len(members)):
        room = [at for at, inside in members.items() if counts[at] < len(inside)]
        counts[max(room, key=lambda at: work[at] / counts[at])] += 1
    return {at: wanted.model_copy(update={"nodes": count}) for at, count in counts.items()}


def _explicit(
    needs: Sequence[Need], wanted: PlacementSpec, members: Mapping[Partition, Sequence[int]]
) -> dict[Partition, PlacementSpec]:
    """Return the map of each partition, with its nodes numbered from 0."""
    shares: dict[Partition, PlacementSpec] = {}
    owner: dict[int, Partition] = {}
    for partition, inside in members.items():
        chosen = {needs[index].module: wanted.node_of(needs[index].module) for index in inside}
        order = sorted(set(chosen.values()))
        for node in order:
            if owner.setdefault(node, partition) != partition:
                raise UsageError(
                    f"placement.map gives node {node} modules of the partitions "
                    f"{owner[node] or 'default'} and {partition or 'default'}",
                    hint="a node belongs to one partition: move one of them to another node",
                )
        renumbered = {module: order.index(node) for module, node in chosen.items()}
        shares[partition] = wanted.model_copy(update={"map": renumbered, "nodes": None})
    return shares
