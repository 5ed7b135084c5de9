"""Modules that take inputs from several others, as chain.yaml names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.spec import ChainSpec, Graph, WorkerSpec, parse_chain

DIAMOND = {"b": "a", "c": "a", "d": "[b, c, a]"}


def chain(inputs: dict[str, str], modules: str = "abcd", links: str = "{}") -> ChainSpec:
    listed = "\n".join(
        f"- {{name: {name}, {f'inputs: {inputs[name]}, ' if name in inputs else ''}layers: [ReLU]}}"
        for name in modules
    )
    return parse_chain(f"name: net\nlinks: {links}\nmodules:\n{listed}\n")


def test_without_inputs_it_is_a_chain() -> None:
    graph = chain({}).graph
    assert graph.sources == graph.links == ((), (0,), (1,), (2,))
    assert graph.targets == ((1,), (2,), (3,), ())
    assert graph.data == (None, (), (), ())
    assert graph.is_chain
    assert graph.below == (3, 2, 1, 0)
    assert graph.numbers == {(0, 1): 1, (1, 2): 2, (2, 3): 3}
    assert graph == chain({"b": "a", "d": "[c]"}).graph


def test_a_diamond_with_a_skip() -> None:
    graph = chain(DIAMOND).graph
    assert graph.sources == ((), (0,), (0,), (1, 2, 0))
    assert graph.targets == ((1, 2, 3), (3,), (3,), ())
    assert not graph.is_chain
    assert graph.below == (2, 1, 1, 0)
    assert graph.beside(0, 3) == 2
    assert sorted(graph.numbers.values()) == [1, 2, 3, 4, 5]
    assert graph.numbers[1, 3] == 3, "a module's first input has its own number"


def test_inputs_of_the_data_travel_from_the_head() -> None:
    graph = chain({"a": "data.0", "b": "data.1", "c": "[a, b]", "d": "[c, data.0]"}).graph
    assert graph.sources == ((), (), (0, 1), (2,))
    assert graph.data == ((0,), (1,), (), (0,))
    assert graph.links == ((), (0,), (0, 1), (2, 0))
    assert graph.below == (3, 2, 1, 0)


def test_a_module_may_have_many_outputs() -> None:
    names = [f"a.{number}" for number in range(12)]
    graph = chain({"b": "a.12", "d": f"[{', '.join(names)}, c]"}).graph
    assert graph.takes == {(0, 1): (12,), (0, 3): tuple(range(12))}
    with pytest.raises(SpecError, match="in another order"):
        chain({"d": "[a.10, a.2, c]"})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"c": "x"}, "module 'c' takes its input from 'x', but the modules are a, b, c, d"),
        ({"b": "c"}, "module 'b' takes its input from 'c', which does not come before it"),
        ({"c": "c"}, "module 'c' takes its input from 'c', which does not come before it"),
        ({"d": "[c, c]"}, "module 'd' names an input twice"),
        ({"c": "a"}, "the output of module 'b' goes nowhere"),
        ({"a": "b"}, "the first module, 'a', takes only 'data.N'"),
        ({"c": "[data.0, b]"}, "module 'c' names 'data.N' before a module"),
        ({"d": "[b.1, b.0, c]"}, "module 'd' names outputs of 'b' in another order"),
        ({"d": "[b.0, c, b.1]"}, "module 'd' names outputs of 'b' in another order"),
        ({"d": "[b.0, b, c]"}, "module 'd' names outputs of 'b' in another order"),
        ({"c": "x.0"}, "module 'c' takes its input from 'x', but the modules are a, b, c, d"),
        ({"c": "[b, data.x]"}, "inputs"),
        ({"c": "[b, data.01]"}, "inputs"),
        ({"c": "[]"}, "inputs"),
    ],
)
def test_inputs_that_cannot_be(inputs: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        chain(inputs)
    assert caught.value.location[0] == "modules"


def test_outputs_of_a_module() -> None:
    graph = chain({"c": "b.1", "d": "[c, b.0, b.2, a]"}).graph
    assert graph.sources == ((), (0,), (1,), (2, 1, 0))
    assert graph.takes == {(1, 2): (1,), (1, 3): (0, 2)}


def test_a_window_that_is_too_small_for_the_way_beside_a_link() -> None:
    skip = {"d": "[c, a]"}
    with pytest.raises(SpecError, match="another way between them has 3 links") as caught:
        chain(skip, links="{window: 2}")
    assert "'window: 3'" in str(caught.value)
    assert chain(skip, links="{window: 3}").links.window == 3
    assert chain({}, links="{window: 1}").links.window == 1


def test_a_spec_is_read_as_it_was_written(make_spec: Callable[..., WorkerSpec]) -> None:
    tail = make_spec("tail", awaited_out=True, resend_out=3)
    assert WorkerSpec.from_json(tail.to_json()) == tail


def test_what_the_ends_of_a_link_must_agree_on(make_spec: Callable[..., WorkerSpec]) -> None:
    spec = make_spec()
    (edge,) = spec.targets
    same: list[dict[str, Any]] = [{"number": 7}, {"awaited": True}, {"resend": 2}]
    other: list[dict[str, Any]] = [{"gradients": 2}, {"target": "x"}, {"tensor": None}]
    for update in same:
        assert spec.link_hash(edge.model_copy(update=update)) == spec.link_hash(edge)
    for update in other:
        assert spec.link_hash(edge.model_copy(update=update)) != spec.link_hash(edge)


def test_the_longest_way_beside_a_link() -> None:
    graph = Graph(((), (0,), (1,), (2, 0), (3, 1, 0)), ((),) * 5)
    assert [graph.beside(*ends) for ends in sorted(graph.numbers)] == [1, 3, 4, 1, 3, 1, 1]
