"""Which replicas take batches, by position in the stream, and the lanes between them."""

from __future__ import annotations

import json

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.spec import parse_chain
from dni_runtime.spec.edge import EdgeSpec
from dni_runtime.spec.members import CHANGES_KEPT, Members, active_of, first_replicas
from dni_runtime.spec.replicas import workers_of
from tests.unit.spec.test_replicas import modules

FROM_1, FROM_13 = {"b": (1,)}, {"b": (1, 3)}


def table() -> Members:
    members = Members({"b": (1, 2)})
    members.learn(20, {"b": (1, 2)}, FROM_13)
    members.learn(50, FROM_13, FROM_1)
    return members


def test_a_change_holds_from_the_next_id_on() -> None:
    members = table()
    assert [members.at(id) for id in (1, 20, 21, 50, 51)] == [
        {"b": (1, 2)}, {"b": (1, 2)}, FROM_13, FROM_13, FROM_1,
    ]  # fmt: skip
    assert members.now == FROM_1


def test_those_that_leave_and_join_get_the_marker_too() -> None:
    members = table()
    assert [one for one in ("b.1", "b.2", "b.3", "a") if members.sees(one, 20)] == [
        "b.1", "b.2", "b.3", "a",
    ]  # fmt: skip
    assert [members.takes("b.2", id) for id in (20, 21)] == [True, False]
    assert [members.takes("b.3", id) for id in (20, 21)] == [False, True]
    assert not members.sees("b.2", 21)
    assert [members.joined(one) for one in ("a", "b.1", "b.2", "b.3")] == [0, 0, 0, 20]
    assert [members.leaves(one) for one in ("a", "b.1", "b.2", "b.3")] == [None, None, 20, 50]


def test_one_that_comes_back_has_not_left() -> None:
    members = table()
    members.learn(70, FROM_1, {"b": (1, 2)})
    assert members.leaves("b.2") is None
    assert members.joined("b.2") == 70
    assert members.siblings("b.2", 70) == ["b.1"]
    assert members.parked("b.1", 3, 71) == ["b.3"]


def test_a_table_outlives_its_process() -> None:
    members = table()
    again = Members.of_json(json.loads(json.dumps(members.to_json())))
    assert [again.at(id) for id in range(60)] == [members.at(id) for id in range(60)]
    fresh = Members({"b": (1, 2)})
    fresh.merge(again)
    assert [fresh.at(id) for id in range(60)] == [members.at(id) for id in range(60)]


def test_a_replica_that_waits_may_hear_of_a_newer_change_first() -> None:
    """From one of several replicas upstream, which has joined later than itself."""
    begun, joined, newer = {"b": (1,)}, {"b": (1, 2)}, {"b": (1, 2, 3)}
    members = Members(begun, late=True)
    members.learn(8, joined, newer)
    members.learn(5, begun, joined)
    assert (members.joined("b.2"), members.joined("b.3")) == (5, 8)
    assert [members.at(id)["b"] for id in (5, 6, 8, 9)] == [(1,), (1, 2), (1, 2), (1, 2, 3)]


def test_a_replica_that_comes_again_did_not_see_what_changed_meanwhile() -> None:
    """It may be sent again what it had before; its first marker tells what is so then."""
    first, second = {"b": (1, 2), "c": (1, 2)}, {"b": (1, 2), "c": (1,)}
    meanwhile, back = {"b": (1,), "c": (1,)}, {"b": (1,), "c": (1, 2)}
    members = Members(first, late=True)
    members.learn(2, first, second)
    members.learn(6, meanwhile, back)
    assert not members.takes("b.2", 6)
    assert (members.joined("c.2"), members.leaves("b.2")) == (6, 5)
    members.learn(6, meanwhile, back)
    assert (members.at(5), members.at(6), members.at(7)) == (second, meanwhile, back)


def test_a_newer_change_that_comes_first_does_not_hide_an_older_one() -> None:
    members = Members({"b": (1, 2, 3)})
    members.learn(9, {"b": (1, 2)}, {"b": (1, 2, 4)})
    assert members.takes("b.3", 8)
    members.learn(8, {"b": (1, 2, 3)}, {"b": (1, 2)})
    assert [members.at(id)["b"] for id in (8, 9, 10)] == [(1, 2, 3), (1, 2), (1, 2, 4)]


def test_only_the_newest_changes_are_kept() -> None:
    members = Members(FROM_1)
    for number in range(2 * CHANGES_KEPT):
        members.learn(10 * (number + 1), members.now, [FROM_13, FROM_1][number % 2])
    assert len(members.to_json()["changes"]) == CHANGES_KEPT
    assert members.takes("b.3", 10 * (2 * CHANGES_KEPT - 1) + 1)
    assert not members.takes("b.3", 10 * 2 * CHANGES_KEPT + 1)
    before = members.to_json()
    members.learn(10, FROM_1, FROM_13)
    assert members.to_json() == before, "one of long ago, which a restarted module sends again"


@pytest.mark.parametrize("wrong", [None, {"b": []}, {"b": [0]}, {"b": ["1"]}, {1: [1]}, {"b": 2}])
def test_what_is_no_set_of_replicas(wrong: object) -> None:
    with pytest.raises(ValueError, match="not"):
        active_of(wrong)


def test_every_batch_takes_one_way_whatever_the_numbers_are() -> None:
    """Both modules change, at ids of their own: a batch goes to one of each that takes batches."""
    workers = workers_of(modules(["1", "{start: 2, most: 4}", "{start: 1, most: 3}", "1"]))
    assert workers[0].elastic == {"b": 2, "c": 1}
    members = Members(first_replicas(workers[0].elastic))
    members.learn(40, {"b": (1, 2), "c": (1,)}, {"b": (1, 2, 4), "c": (1, 2)})
    members.learn(90, {"b": (1, 2, 4), "c": (1, 2)}, {"b": (1,), "c": (1, 2, 3)})
    by_name = {worker.module: worker for worker in workers}
    taken: dict[tuple[str, int], int] = {}
    for id in range(1, 140):
        at, way = "a", list[str]()
        while by_name[at].targets:
            links = [one for one in by_name[at].links_out if members.carries(one, id)]
            assert len(links) == 1, (id, at)
            at = links[0].target
            way.append(at)
            taken[at, (id > 40) + (id > 90)] = taken.get((at, (id > 40) + (id > 90)), 0) + 1
        assert [one.partition(".")[0] for one in way] == ["b", "c", "d"]
    assert {name for name, period in taken if period == 1} == {
        "b.1", "b.2", "b.4", "c.1", "c.2", "d",
    }  # fmt: skip
    assert abs(taken["b.1", 1] - taken["b.4", 1]) <= 1, "of as many ids in a row each gets one"


def test_a_link_of_others_carries_as_before() -> None:
    edge = EdgeSpec(source="x.1", target="y", number=1, tensor=None, gradients=0, route=((2, 1),))
    members = table()
    assert [members.carries(edge, id) for id in range(8)] == [edge.carries(id) for id in range(8)]
    assert not members.elastic(edge)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [("{start: 3, most: 2}", "is more than"), ("{most: 1}", "most"), ("0", "replicas")],
)
def test_numbers_that_cannot_be(replicas: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_chain(
            "name: n\nmodules:\n- {name: a, layers: [ReLU]}\n"
            f"- {{name: b, replicas: {replicas}, layers: [ReLU]}}\n- {{name: c, layers: [ReLU]}}\n"
        )
    assert said in str(caught.value)
    assert "replicas" in str(caught.value)
