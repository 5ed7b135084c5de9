"""Placement of modules on nodes (pure; nodes are numbers here, Slurm names them later)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dni_runtime.errors import SpecError, UsageError
from dni_runtime.plan.plan import Need
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.machines import PlacementSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.predicting import FRONT

if TYPE_CHECKING:  # it imports what images need
    from dni_runtime.plan.host import Locator

DEFAULT_MEMORY_MIB = 2048
"""Default memory of a module's worker; torch alone takes some hundred MiB."""


@dataclass(frozen=True)
class Capacity:
    """The resources of a node; None if unknown."""

    cpus: int | None = None
    gpus: int | None = None
    memory_mib: int | None = None
    modules: int | None = None  # most on the node

    def lacks(self, needs: Sequence[Need]) -> str | None:
        """Return a resource that the modules need and the node lacks, or None."""
        asked = {
            "CPUs": (sum(need.cpus for need in needs), self.cpus),
            "GPUs": (sum(need.gpus for need in needs), self.gpus),
            "MiB of memory": (sum(need.memory_mib for need in needs), self.memory_mib),
            "modules": (len(needs), self.modules),
        }
        for what, (amount, there) in asked.items():
            if there is not None and amount > there:
                return f"{amount} {what}, but a node has {there}"
        return None


def needs_of(
    chain: ChainSpec, workers: Sequence[WorkerSpec], costs: Mapping[str, float] | None = None
) -> tuple[Need, ...]:
    """Return each worker's resources; by default a module on a GPU requests one."""
    needs = []
    for worker in workers:
        asked, module = chain.resources(worker.index), module_of(worker.module)
        wants_gpu = worker.device.partition(":")[0] in ("cuda", "rocm")
        needs.append(
            Need(
                module=worker.module,
                cpus=worker.cpus,
                gpus=int(wants_gpu) if asked.gpus is None else asked.gpus,
                memory_mib=asked.memory_mib or DEFAULT_MEMORY_MIB,
                cost=1.0 if costs is None else costs[module] / worker.replicas,
            )
        )
    return tuple(needs)


def check_gpus(workers: Sequence[WorkerSpec], needs: Sequence[Need]) -> None:
    """Refuse numbers of GPUs where a worker sees those alone that it asks for, from 0 on."""
    for worker, need in zip(workers, needs, strict=True):
        kind, _, number = worker.device.partition(":")
        if int(number or 0) >= max(need.gpus, 1):
            raise UsageError(
                f"module {module_of(worker.module)!r} has device {worker.device!r}, but its worker "
                f"sees the {need.gpus} GPUs alone that it asks for, counted from 0",
                hint=f"write 'device: {kind}'",
            )


def wanted_placement(chain: ChainSpec, nodes: int | None) -> PlacementSpec:
    """Return the chain's placement, with the number of nodes from the command line."""
    return chain.placement if nodes is None else chain.placement.model_copy(update={"nodes": nodes})


def place(
    needs: Sequence[Need], placement: PlacementSpec, *, node: Capacity | None = None
) -> tuple[int, ...]:
    """Place modules, given head first: return the node of each, numbered from 0 without gaps."""
    node = Capacity() if node is None else node
    modules = node.modules if placement.per_node is None else placement.per_node
    node = Capacity(node.cpus, node.gpus, node.memory_mib, modules)
    for need in needs:
        if (problem := node.lacks([need])) is not None:
            raise UsageError(
                f"module {need.module!r} needs {problem}",
                hint="lower its 'resources', or use another partition",
            )
    if placement.strategy == "explicit":
        return _explicit(needs, placement, node)
    count = placement.nodes or 1
    if count > len(needs):
        raise UsageError(
            f"{count} nodes are requested, but there are {len(needs)} modules",
            hint=f"request at most {len(needs)} nodes",
        )
    if placement.strategy == "packed":
        blocks = _packed(needs, node)
        if len(blocks) > count:
            raise UsageError(
                f"packed, the modules need {len(blocks)} nodes, but {count} are requested "
                f"({_why(needs, blocks, node)})",
                hint=f"--nodes {len(blocks)}, or lower the modules' 'resources'",
            )
    else:
        even = [Need(need.module, need.cpus, need.gpus, need.memory_mib) for need in needs]
        blocks = _balanced(even if placement.strategy == "spread" else needs, count, node)
    return tuple(number for number, block in enumerate(blocks) for _ in range(block))


def _explicit(needs: Sequence[Need], placement: PlacementSpec, node: Capacity) -> tuple[int, ...]:
    chosen = tuple(placement.node_of(need.module) for need in needs)
    count = max(chosen) + 1
    if placement.nodes is not None and count > placement.nodes:
        raise UsageError(
            f"placement.map uses node {count - 1}, but the {_nodes(placement.nodes)} "
            "requested are numbered from 0",
            hint=f"use --nodes {count} or another map",
        )
    for number in range(count):
        there = [need for need, at in zip(needs, chosen, strict=True) if at == number]
        if not there:
            raise UsageError(
                f"placement.map leaves node {number} empty", hint="number the nodes from 0"
            )
        if (problem := node.lacks(there)) is not None:
            raise UsageError(
                f"placement.map gives node {number} {len(there)} modules, which need {problem}",
                hint="move one to another node",
            )
    return chosen


def _packed(needs: Sequence[Need], node: Capacity) -> list[int]:
    """Return the sizes of the blocks if each node is filled before the next."""
    blocks: list[int] = []
    start = 0
    for end in range(1, len(needs) + 1):
        if node.lacks(needs[start:end]) is not None:
            blocks.append(end - 1 - start)
            start = end - 1
    return [*blocks, len(needs) - start]


def _balanced(needs: Sequence[Need], count: int, node: Capacity) -> list[int]:
    """Return sizes of ``count`` blocks of neighbours with the smallest possible largest cost.

    The linear partition problem, by dynamic programming (Skiena, The Algorithm Design Manual,
    10.7). Ties are broken by the sum of squares, which also balances the lighter nodes.
    """
    total = len(needs)
    # For each number of modules: largest cost, sum of squares and sizes of so many blocks.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for _ in range(count):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for start in sorted(best, reverse=True):
            worst, squares, sizes = best[start]
            for end in range(start + 1, total + 1):
                if node.lacks(needs[start:end]) is not None:
                    break  # a longer block fits even less
                cost = sum(need.cost for need in needs[start:end])
                candidate = (max(worst, cost), squares + cost * cost, [*sizes, end - start])
                if end not in longer or candidate[:2] < longer[end][:2]:
                    longer[end] = candidate
        best = longer
    if total not in best:
        least = _packed(needs, node)
        raise UsageError(
            f"the modules do not fit on {_nodes(count)}: {len(least)} are needed "
            f"({_why(needs, least, node)})",
            hint=f"--nodes {len(least)}, or lower the modules' 'resources'",
        )
    return best[total][2]


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _why(needs: Sequence[Need], blocks: Sequence[int], node: Capacity) -> str:
    return f"up to {needs[blocks[0]].module!r}, they need {node.lacks(needs[: blocks[0] + 1])}"


def crossing(links: Sequence[Sequence[int]], nodes: Sequence[int]) -> list[int | None]:
    """Return for each worker one that has a link to it over the network, if any."""
    return [
        next((source for source in sources if nodes[source] != nodes[index]), None)
        for index, sources in enumerate(links)
    ]


def _links(workers: Sequence[WorkerSpec]) -> list[list[int]]:
    numbers = {worker.module: number for number, worker in enumerate(workers)}
    return [
        [numbers[link.source] for link in worker.links_in if link.source != FRONT]
        + [numbers[lane.source] for lane in worker.peers if lane.target == worker.module]
        for worker in workers
    ]


def link_kinds(
    chain: ChainSpec, workers: Sequence[WorkerSpec], interface: str | None, nodes: Sequence[int]
) -> dict[str, tuple[str, str | None]]:
    """Return transport and interface of the links that others open to each worker.

    ``auto``: ipc if all ends are on one node, else tcp on the chain's interface, or on
    ``interface``, the site's. ``nodes`` has the node of each worker. A chain's front counts as
    being on another node.
    """
    interface = chain.links.interface or interface
    kinds: dict[str, tuple[str, str | None]] = {}
    links = _links(workers)
    for index, source in enumerate(crossing(links, nodes)):
        worker = workers[index]
        fed = any(link.source == FRONT for link in worker.links_in)
        if not (fed or links[index]) and worker.backend is None:  # nobody connects to such a head
            continue
        tcp = source is not None or fed or chain.links.transport == "tcp"
        kinds[worker.module] = ("tcp", interface) if tcp else ("ipc", None)
        if any(link.target == FRONT for link in worker.links_out):
            kinds[FRONT] = ("tcp", interface)
    return kinds


def check_links(
    chain: ChainSpec,
    workers: Sequence[WorkerSpec],
    nodes: Sequence[int],  # of each worker
    interface: str | None,  # of links between nodes, if the chain names none
    locate: Locator,
) -> None:
    """Refuse links that cannot work between the nodes."""
    crossed = enumerate(crossing(_links(workers), nodes))
    ends = next(((source, index) for index, source in crossed if source is not None), None)
    if ends is None:
        return
    pair = f"{' and '.join(repr(workers[end].module) for end in ends)} are on two nodes"
    if chain.links.transport == "ipc":
        raise SpecError(
            f"{locate('links', 'transport')}: {pair}, which ipc cannot connect",
            hint="omit 'transport' (auto), or place all modules on one node",
        )
    if chain.links.interface is None and interface is None:
        raise SpecError(
            f"{locate('links', 'interface')}: {pair}, but no network interface is set",
            hint="set one, or a network such as 10.0.0.0/16, in 'links.interface' or the site "
            "profile's 'interface'",
        )
