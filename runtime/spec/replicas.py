"""Replicas: the workers of a chain, several for a module that has ``replicas``.

The id of a batch says which replica gets it (:func:`~dni_runtime.spec.edge.replica_of`), so it
goes the same way after any restart; every marker goes to all. A link between two modules becomes
one *lane* for each pair of replicas. If both modules have the same number, there are lanes only
between those of the same number, which are the ones that have batches in common.

In a chain that only predicts, each batch goes to the replica with the fewest unanswered ones.
Batches overtake each other there, but not those on one lane: behind, a worker has a lane downstream
for each lane from upstream. Such *streams* cannot be joined.

The number of an *elastic* module's replicas may change, but only when the whole chain starts
(:func:`with_replicas`): while it trains the numbers are constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product

from dni_runtime.errors import SpecError
from dni_runtime.spec.edge import CHOSEN, EdgeSpec, LaneSpec, Route
from dni_runtime.spec.named import module_of, number_of, takes_part, worker_name
from dni_runtime.spec.predicting import FRONT
from dni_runtime.spec.worker import WorkerSpec


def replicas_of(workers: Sequence[str]) -> dict[str, list[str]]:
    """Return each module's workers, by the names of all workers."""
    replicas: dict[str, list[str]] = {}
    for worker in workers:
        replicas.setdefault(module_of(worker), []).append(worker)
    return replicas


def tails_of(workers: Sequence[str]) -> list[str]:
    """Return the workers of the last module, by the names of all workers."""
    return replicas_of(workers)[module_of(workers[-1])]


def modules_of(workers: Sequence[WorkerSpec]) -> tuple[WorkerSpec, ...]:
    """Return the modules' specs that :func:`workers_of` made workers of."""
    return tuple(worker.of_module() for worker in workers if worker.replica == 1)


def workers_of(modules: Sequence[WorkerSpec]) -> tuple[WorkerSpec, ...]:
    """Return the spec of each worker, head first, the replicas of a module one after the other."""
    if all(module.replicas == 1 for module in modules):
        return tuple(modules)
    replicas = {
        module.module: (module.replicas, module.module in module.elastic) for module in modules
    }
    links = {edge.number: edge for module in modules for edge in module.sources}
    numbers, streams = count(max(links, default=0) + 1), _streams(modules)
    lanes = {
        number: tuple(_lanes(edge, replicas, streams[edge.source], numbers))
        for number, edge in links.items()
    }
    return tuple(
        worker
        for module in modules
        for worker in _workers(module, lanes, tuple(_peers(module, numbers)))
    )


def _streams(modules: Sequence[WorkerSpec]) -> dict[str, int]:
    """Return how many streams each worker of a module has: one, if it trains."""
    streams, replicas = {FRONT: 1}, {module.module: module.replicas for module in modules}
    for module in modules:
        if module.trained is None or module.module == FRONT:
            streams[module.module] = 1
            continue
        above = [streams[edge.source] * replicas[edge.source] for edge in module.sources]
        streams[module.module] = max(above)
        if len(above) > 1 and max(*above, module.replicas) > 1:
            raise SpecError(
                f"module {module.module!r} has {len(above)} inputs, of which batches must come in "
                "one order; so neither it nor modules before it can be served by replicas",
                hint="replicas are served of modules behind the last one with several inputs",
            )
    return streams


def with_replicas(worker: WorkerSpec, counts: Mapping[str, int]) -> WorkerSpec:
    """Return a worker's spec for a start with these numbers of replicas of elastic modules.

    Lanes to replicas that do not take part are left out; the others say which batches they carry.
    """

    def there(lane: LaneSpec) -> bool:
        return takes_part(lane.source, counts) and takes_part(lane.target, counts)

    def routed(lane: LaneSpec) -> LaneSpec:
        ends = [
            (counts.get(module_of(name), 1), number_of(name)) for name in (lane.source, lane.target)
        ]
        splits = [(count, number) for count, number in ends if count > 1]
        return lane.model_copy(update={"route": tuple(dict.fromkeys((*lane.route, *splits)))})

    def carrying(lanes: tuple[LaneSpec, ...]) -> tuple[LaneSpec, ...]:
        candidates = [routed(lane) for lane in lanes if there(lane)]
        return tuple(lane for lane in candidates if _carries(lane.route))

    def now(edges: tuple[EdgeSpec, ...]) -> tuple[EdgeSpec, ...]:
        return tuple(edge.with_lanes(carrying(edge.lanes)) for edge in edges)

    module = module_of(worker.module)
    return worker.model_copy(
        update={
            "replicas": counts.get(module, worker.replicas),
            "sources": now(worker.sources),
            "targets": now(worker.targets),
            "peers": tuple(lane for lane in worker.peers if there(lane)),
        }
    )


def _carries(route: Route) -> bool:
    """Whether a lane carries batches: not between unlike replicas of modules with as many."""
    return len({replicas for replicas, _ in route}) == len(route)


def _lanes(
    edge: EdgeSpec, replicas: dict[str, tuple[int, bool]], streams: int, numbers: Iterator[int]
) -> Iterator[LaneSpec]:
    (above, elastic_above), (below, elastic_below) = replicas[edge.source], replicas[edge.target]
    free = edge.number
    for _, upper, lower in product(range(streams), range(1, above + 1), range(1, below + 1)):
        ends = [(above, upper, elastic_above), (below, lower, elastic_below)]
        splits = [(count, it) for count, it, elastic in ends if count > 1 and not elastic]
        route = CHOSEN if edge.predicts else tuple(dict.fromkeys(splits))
        if _carries(route):
            source, target = (
                worker_name(edge.source, upper, above),
                worker_name(edge.target, lower, below),
            )
            yield LaneSpec(source=source, target=target, number=free, route=route)
            free = next(numbers)


def _peers(module: WorkerSpec, numbers: Iterator[int]) -> Iterator[LaneSpec]:
    """Yield the lanes by which replicas share their weights: from each to the first."""
    if module.trained is not None:
        return
    names = [
        worker_name(module.module, index + 1, module.replicas) for index in range(module.replicas)
    ]
    for name in names[1:]:
        yield LaneSpec(source=name, target=names[0], number=next(numbers))


def _workers(
    module: WorkerSpec, lanes: dict[int, tuple[LaneSpec, ...]], peers: tuple[LaneSpec, ...]
) -> Iterator[WorkerSpec]:
    for replica in range(1, module.replicas + 1):
        name = worker_name(module.module, replica, module.replicas)

        def edges_of(
            edges: tuple[EdgeSpec, ...], end: str, name: str = name
        ) -> tuple[EdgeSpec, ...]:
            return tuple(
                edge.with_lanes(lane for lane in lanes[edge.number] if getattr(lane, end) == name)
                for edge in edges
            )

        yield module.model_copy(
            update={
                "module": name,
                "replica": replica,
                "sources": edges_of(module.sources, "target"),
                "targets": edges_of(module.targets, "source"),
                "peers": tuple(lane for lane in peers if name in (lane.source, lane.target)),
            }
        )
