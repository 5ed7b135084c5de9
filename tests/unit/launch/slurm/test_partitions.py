"""Where modules go that ask for different partitions."""

from __future__ import annotations

import pytest

from dni_runtime.errors import UsageError
from dni_runtime.launch.placement import Capacity
from dni_runtime.launch.plan import Need
from dni_runtime.launch.slurm.partitions import place_in_partitions
from dni_runtime.spec import PlacementSpec

NEEDS = tuple(Need(name, cost=cost) for name, cost in zip("abcd", (1, 1, 1, 9), strict=True))


def spec(**settings: object) -> PlacementSpec:
    return PlacementSpec.model_validate(settings)


def test_one_partition_is_placed_as_ever() -> None:
    placed, at = place_in_partitions(NEEDS, spec(nodes=2), ["x"] * 4, {})
    assert (placed, at) == ((0, 0, 0, 1), ("x", "x"))


@pytest.mark.parametrize(
    ("partitions", "nodes", "placed", "at"),
    [
        ("xxyy", None, (0, 0, 1, 1), ("x", "y")),
        # the further node goes where the most work is
        ("xxyy", 3, (0, 0, 1, 2), ("x", "y", "y")),
        ("xxyy", 4, (0, 1, 2, 3), ("x", "x", "y", "y")),
        # the head's partition comes first, nodes of one partition follow each other
        ("yxyx", None, (0, 1, 0, 1), ("y", "x")),
        ("yxyx", 3, (0, 1, 0, 2), ("y", "x", "x")),
    ],
)
def test_each_partition_has_nodes_of_its_own(
    partitions: str, nodes: int | None, placed: tuple[int, ...], at: tuple[str, ...]
) -> None:
    assert place_in_partitions(NEEDS, spec(nodes=nodes), [*partitions], {}) == (placed, at)


@pytest.mark.parametrize("nodes", [1, 5])
def test_too_few_or_too_many_nodes(nodes: int) -> None:
    with pytest.raises(UsageError, match=r"2 partitions \(x, y\) need 2 to 4"):
        place_in_partitions(NEEDS, spec(nodes=nodes), [*"xxyy"], {})


def test_a_map_is_renumbered() -> None:
    wanted = spec(strategy="explicit", map={"a": 1, "b": 0, "c": 0, "d": 2})
    placed, at = place_in_partitions(NEEDS, wanted, [*"xyyx"], {})
    assert (placed, at) == ((0, 2, 2, 1), ("x", "x", "y"))


def test_a_map_that_mixes_partitions_is_refused() -> None:
    wanted = spec(strategy="explicit", map={"a": 0, "b": 0, "c": 1, "d": 1})
    with pytest.raises(UsageError, match="node 1 modules of the partitions y and default"):
        place_in_partitions(NEEDS, wanted, ["x", "x", "y", None], {})


def test_each_partition_has_its_own_kind_of_node() -> None:
    nodes = {"x": Capacity(cpus=1), "y": Capacity(cpus=8)}
    with pytest.raises(UsageError, match="the modules do not fit on 1 node"):
        place_in_partitions(NEEDS, spec(), [*"xxyy"], nodes)
    assert place_in_partitions(NEEDS, spec(), [*"xyyy"], nodes)[1] == ("x", "y")
