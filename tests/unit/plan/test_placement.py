"""Placement is a pure function: every strategy, and every refusal with its reason."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dni_runtime.errors import UsageError
from dni_runtime.plan.placement import Capacity, crossing, place
from dni_runtime.plan.plan import Need
from dni_runtime.spec import Graph
from dni_runtime.spec.machines import PlacementSpec


def needs(*costs: float, cpus: int = 1, gpus: int = 0, memory_mib: int = 100) -> list[Need]:
    return [Need(f"m{i}", cpus, gpus, memory_mib, cost) for i, cost in enumerate(costs)]


def spec(strategy: str, nodes: int | None = None, **more: object) -> PlacementSpec:
    return PlacementSpec.model_validate({"strategy": strategy, "nodes": nodes, **more})


def test_packed_fills_one_node_before_the_next() -> None:
    node = Capacity(cpus=4)
    assert place(needs(1, 1, 1, 1, 1, cpus=2), spec("packed", 3), node=node) == (0, 0, 1, 1, 2)
    assert place(needs(1, 1, 1), spec("packed", 3), node=node) == (0, 0, 0)
    assert place(needs(1, 1, 1), spec("packed", 3, per_node=2), node=node) == (0, 0, 1)
    assert place(
        needs(1, 1, memory_mib=700), spec("packed", 2), node=Capacity(memory_mib=1000)
    ) == (
        0,
        1,
    )


def test_spread_gives_each_node_as_many_modules() -> None:
    assert place(needs(9, 1, 1, 1), spec("spread", 2)) == (0, 0, 1, 1)
    counts = [place(needs(*[1] * 64), spec("spread", 3)).count(node) for node in range(3)]
    assert sorted(counts) == [21, 21, 22]


def test_auto_gives_each_node_as_much_work() -> None:
    assert place(needs(9, 1, 1, 1), spec("auto", 2)) == (0, 1, 1, 1)
    assert place(needs(1, 1, 1, 9, 1, 1), spec("auto", 3)) == (0, 0, 0, 1, 2, 2)
    assert place(needs(5, 5), spec("auto")) == (0, 0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 4))
def test_auto_is_the_best_of_all_contiguous_placements(costs: list[int], nodes: int) -> None:
    nodes = min(nodes, len(costs))
    given_ = needs(*map(float, costs))

    def heaviest(placed: tuple[int, ...]) -> float:
        return max(
            sum(n.cost for n, at in zip(given_, placed, strict=True) if at == node)
            for node in range(nodes)
        )

    found = place(given_, spec("auto", nodes))
    assert sorted(found) == list(found)
    assert set(found) == set(range(nodes))
    others = [
        placed
        for placed in product(range(nodes), repeat=len(costs))
        if sorted(placed) == list(placed) and set(placed) == set(range(nodes))
    ]
    assert heaviest(found) == min(map(heaviest, others))


def test_auto_keeps_to_what_a_node_has() -> None:
    heavy_first = needs(1, 1, 1, 100, cpus=2)
    assert place(heavy_first, spec("auto", 2), node=Capacity(cpus=4)) == (0, 0, 1, 1)
    assert place(needs(1, 1, 1, gpus=1), spec("auto", 3), node=Capacity(gpus=1)) == (0, 1, 2)


def test_explicit_follows_the_map() -> None:
    wanted = spec("explicit", map={"m0": 1, "m1": 0, "m2": 1})
    assert place(needs(1, 1, 1), wanted) == (1, 0, 1)
    chain = Graph(((), (0,), (1,), (2,)), ((),) * 4)
    assert crossing(chain.links, (1, 0, 0, 1)) == [None, 0, None, 2]
    diamond = Graph(((), (0,), (0,), (1, 2)), ((),) * 4)
    assert crossing(diamond.links, (0, 0, 1, 0)) == [None, None, 0, 2]


@pytest.mark.parametrize(
    ("wanted", "node", "words"),
    [
        (spec("auto", 4), Capacity(), ["4 nodes", "3 modules"]),
        (
            spec("auto", 1),
            Capacity(cpus=3),
            ["on 1 node:", "3 are needed", "4 CPUs, but a node has 3"],
        ),
        (spec("packed", 2), Capacity(cpus=3), ["3 nodes", "2 are requested", "--nodes 3"]),
        (spec("spread", 3), Capacity(cpus=1), ["'m0'", "2 CPUs, but a node has 1"]),
        (spec("spread", 3), Capacity(memory_mib=50), ["'m0'", "100 MiB of memory, but"]),
        (spec("auto", 1, per_node=2), Capacity(), ["3 modules, but a node has 2"]),
        (
            spec("explicit", map={"m0": 0, "m1": 0, "m2": 1}),
            Capacity(cpus=3),
            ["node 0", "2 modules", "4 CPUs, but a node has 3"],
        ),
        (spec("explicit", map={"m0": 0, "m1": 2, "m2": 2}), Capacity(), ["node 1 empty"]),
        (spec("explicit", 1, map={"m0": 0, "m1": 1, "m2": 0}), Capacity(), ["node 1", "1 node"]),
    ],
)
def test_the_impossible_is_refused_with_its_reason(
    wanted: PlacementSpec, node: Capacity, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        place(needs(1, 1, 1, cpus=2), wanted, node=node)
    for word in words:
        assert word in str(caught.value)
