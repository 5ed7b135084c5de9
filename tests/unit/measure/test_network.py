"""Which lines a chain's links are between the nodes of an allocation."""

from __future__ import annotations

from pathlib import Path

from dni_runtime.data import describe
from dni_runtime.measure.network import lines_between, lines_of_chain, lines_within
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import ChainSpec, LinksSpec, WorkerSpec
from dni_runtime.spec.profile import ProfileSpec
from dni_runtime.spec.replicas import workers_of

HOSTS = ("n1", "n2")


def chain(links: dict[str, object]) -> ChainSpec:
    modules = [{"name": "a", "layers": ["Flatten"]}] + [
        {"name": name, "layers": [{"LazyLinear": {"out_features": 10}}]} for name in "bcd"
    ]
    data = {"dataset": "digits", "batch_size": 8}
    return ChainSpec.model_validate({"name": "x", "data": data, "modules": modules, "links": links})


def workers(spec: ChainSpec) -> tuple[WorkerSpec, ...]:
    return worker_specs(spec, describe(spec.data, Path()))


def test_each_line_once_and_as_the_chain_says() -> None:
    spec = chain({"security": "none", "window": 3, "dtype": "int8", "port": 5000})
    profile = ProfileSpec(interface="ib0")
    lines = lines_of_chain(spec, workers(spec), profile, (0, 0, 1, 1), HOSTS)
    assert [(line.source, line.sink, line.links.transport) for line in lines] == [
        ("n1", "n1", "ipc"), ("n1", "n2", "tcp"), ("n2", "n2", "ipc"),
    ]  # fmt: skip
    over = lines[1].links
    assert (over.interface, over.port, over.security, over.window) == ("ib0", 5000, "none", 3)
    assert over.dtype is None  # what is counted is what travels
    for line in lines:
        LinksSpec(**line.links.model_dump())  # as the other process reads it
        assert len(set(line.ends)) == 2


def test_there_and_back_are_two_lines() -> None:
    spec = chain({"interface": "ib0"})
    lines = lines_of_chain(spec, workers(spec), ProfileSpec(), (0, 1, 0, 1), HOSTS)
    assert [(line.source, line.sink) for line in lines] == [("n1", "n2"), ("n2", "n1")]


def test_replicas_of_a_module_have_links_with_each_other() -> None:
    spec = chain({"interface": "ib0"})
    modules = (spec.modules[0], spec.modules[1].model_copy(update={"replicas": 2}), spec.modules[2])
    spec = spec.model_copy(update={"modules": modules})
    names = workers_of(workers(spec))
    assert [worker.module for worker in names] == ["a", "b.1", "b.2", "c"]
    lines = lines_of_chain(spec, names, ProfileSpec(), (0, 1, 2, 0), ("n1", "n2", "n3"))
    assert ("n3", "n2") in [(line.source, line.sink) for line in lines]
    assert len(lines) == 5


def test_without_a_chain() -> None:
    assert [(line.source, line.sink) for line in lines_between("abc", "ib0")] == [
        ("a", "b"), ("a", "c"), ("b", "c"),
    ]  # fmt: skip
    transports = {line.links.transport for line in lines_between("abc", "ib0")}
    assert transports == {"tcp"}
    ipc, tcp = lines_within("a", LinksSpec(transport="tcp", interface="ib0", port=5000))
    assert (ipc.links.transport, ipc.links.port) == ("ipc", None)
    assert (tcp.links.interface, tcp.links.security) == (None, "curve")
