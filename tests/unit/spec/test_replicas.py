"""From modules to workers: which replica gets a batch, and by which link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.spec import ChainSpec, DataInfo, WorkerSpec, parse_chain
from dni_runtime.spec.edge import replica_of
from dni_runtime.spec.modules import ElasticSpec
from dni_runtime.spec.named import module_of, number_of
from dni_runtime.spec.predicting import FRONT, predicting
from dni_runtime.spec.replicas import modules_of, with_replicas, workers_of
from tests.specs import float32, int64, refused, specs_of

INFO = DataInfo(sample=float32(8), label=int64(), classes=8)
OWN = "data: {path: 'x-{replica}'}"
GROUP = "replication: {backend: gloo}"
ALL_REDUCE = "replication: {strategy: all-reduce"
LINEAR = "{Linear: {in_features: 8, out_features: 8}}"


def modules(counts: Sequence[str] = "1231", *, more: str = "") -> tuple[WorkerSpec, ...]:
    listed = "".join(
        f"- {{name: {name}, replicas: {count}, layers: [{LINEAR}]}}\n"
        for name, count in zip("abcdefgh", counts, strict=False)
    )
    text = f"name: net\ndefaults: {{interface: mixed}}\n{more}\nmodules:\n{listed}"
    return specs_of(text, INFO)


def started(
    counts: Sequence[str], now: Mapping[str, int] | None = None, *, more: str = ""
) -> list[WorkerSpec]:
    """Return the workers of a start with these numbers of replicas, by default the first ones."""
    workers = workers_of(modules(counts, more=more))
    now = workers[0].elastic if now is None else now
    found = [with_replicas(one, now) for one in workers]
    return [one for one in found if one.replica <= one.replicas]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_each_replica_gets_its_share(replicas: int) -> None:
    rows = [range(first, first + replicas) for first in range(0, 300 * replicas, replicas)]
    for row in rows:
        got = {replica_of(id, replicas) for id in row}
        assert got == set(range(1, replicas + 1))


@pytest.mark.parametrize(("every", "replicas"), list(product((2, 3, 4, 9, 33), (2, 3, 4))))
def test_markers_at_regular_ids_take_batches_from_all(every: int, replicas: int) -> None:
    got = Counter(replica_of(id, replicas) for id in range(20_000) if id % every)
    assert max(got.values()) < 1.05 * min(got.values())


def test_workers_and_their_links() -> None:
    workers = workers_of(modules())
    assert [one.module for one in workers] == ["a", "b.1", "b.2", "c.1", "c.2", "c.3", "d"]
    assert [one.index for one in workers] == [0, 1, 1, 2, 2, 2, 3]
    a, b1, _, c1, c2, _, d = workers
    assert [link.target for link in a.links_out] == ["b.1", "b.2"]
    assert [link.target for link in b1.links_out] == ["c.1", "c.2", "c.3"]
    assert [link.source for link in c2.links_in] == ["b.1", "b.2"]
    assert [link.source for link in d.links_in] == ["c.1", "c.2", "c.3"]
    assert [(one.source, one.target) for one in c1.peers] == [("c.2", "c.1"), ("c.3", "c.1")]
    assert [(one.source, one.target) for one in c2.peers] == [("c.2", "c.1")]
    assert (a.peers, d.peers) == ((), ())
    assert c2.neighbours == ("b.1", "b.2", "d", "c.1")
    assert a.head is not None
    assert a.head.sync_steps == 32


def test_both_ends_mean_the_same_link() -> None:
    workers = workers_of(modules())
    out = {link.number: link for one in workers for link in one.links_out}
    into = {link.number: link for one in workers for link in one.links_in}
    assert out == into
    numbers = [*out, *{lane.number for one in workers for lane in one.peers}]
    assert len(numbers) == len(set(numbers)) == 2 + 6 + 3 + 1 + 2
    assert {1, 2, 3} <= set(numbers), "links of a chain without replicas keep theirs"


@pytest.mark.parametrize("more", ["", OWN])
@pytest.mark.parametrize("counts", ["121", "1231", "1331", "1421", "1611"])
def test_a_batch_has_one_way(counts: str, more: str) -> None:
    workers = started(counts, more=more)
    assert bool(workers[0].elastic) is not bool(more)
    for id in range(1, 500):
        at = {"a"}
        for count in counts[1:]:
            at = {
                link.target
                for one in workers
                if one.module in at
                for link in one.links_out
                if link.carries(id)
            }
            assert len(at) == 1
            assert all(
                name.endswith(f".{replica_of(id, int(count))}") for name in at if "." in name
            )
        assert at == {workers[-1].module}


def targets(worker: WorkerSpec) -> list[str]:
    return [link.target for link in worker.links_out]


def test_as_many_replicas_on_both_sides_are_linked_in_pairs() -> None:
    assert targets(workers_of(modules("1331", more=OWN))[2]) == ["c.2"]
    assert targets(workers_of(modules("1331"))[2]) == ["c.1", "c.2", "c.3"], "it may change"
    assert targets(started("1331")[2]) == ["c.2"]


ELASTIC = "{start: 1, most: 4}"


def test_a_start_has_links_between_the_replicas_that_there_are() -> None:
    workers = started(["1", ELASTIC, ELASTIC, "1"], {"b": 2, "c": 3})
    assert [one.module for one in workers] == ["a", "b.1", "b.2", "c.1", "c.2", "c.3", "d"]
    assert [one.replicas for one in workers] == [1, 2, 2, 3, 3, 3, 1]
    a, b1, b2, c1, c2, c3, d = workers
    assert targets(a) == ["b.1", "b.2"]
    assert targets(b1) == targets(b2) == ["c.1", "c.2", "c.3"]
    assert [link.source for link in d.links_in] == ["c.1", "c.2", "c.3"]
    assert [link.route for link in a.links_out] == [((2, 1),), ((2, 2),)]
    assert [link.route for link in b2.links_out] == [((2, 2), (3, number)) for number in (1, 2, 3)]
    assert [(one.source, one.target) for one in c1.peers] == [("c.2", "c.1"), ("c.3", "c.1")]
    assert [(one.source, one.target) for one in c3.peers] == [("c.3", "c.1")]
    assert c2.neighbours == ("b.1", "b.2", "d", "c.1")
    out = {link.number: link for one in workers for link in one.links_out}
    assert out == {link.number: link for one in workers for link in one.links_in}
    numbers = {link.number for one in workers_of(modules(["1", ELASTIC, ELASTIC, "1"]))
               for link in one.links_in}  # fmt: skip
    assert {*out} < numbers, "a link keeps its number, and its port"


def test_with_one_replica_left_nothing_is_shared_and_all_batches_are_its_own() -> None:
    a, b, c1, _, d = started(["1", ELASTIC, ELASTIC, "1"], {"b": 1, "c": 2})
    assert (b.module, b.replicas, b.peers) == ("b.1", 1, ())
    assert [link.route for link in (*a.links_out, *b.links_out)] == [(), ((2, 1),), ((2, 2),)]
    assert b.neighbours == ("a", "c.1", "c.2")
    assert c1.siblings == ("c.1", "c.2")
    assert d.siblings == ("d",)
    assert b.siblings == ("b.1",)


def test_as_many_replicas_are_linked_in_pairs_also_if_only_one_number_is_fixed() -> None:
    before = started(["2", "{start: 2, most: 3}", "1"], more=OWN)
    assert [targets(one) for one in before[:2]] == [["b.1"], ["b.2"]]
    assert [link.route for one in before[:2] for link in one.links_out] == [((2, 1),), ((2, 2),)]
    after = started(["2", "{start: 2, most: 3}", "1"], {"b": 3}, more=OWN)
    assert [targets(one) for one in after[:2]] == [["b.1", "b.2", "b.3"]] * 2


def test_without_other_numbers_nothing_changes() -> None:
    workers = workers_of(modules("1331", more=OWN))
    assert [with_replicas(one, {}) for one in workers] == list(workers)
    assert with_replicas(modules("111")[1], {}) == modules("111")[1]


@pytest.mark.parametrize(
    ("counts", "now", "more"),
    [
        (["1", ELASTIC, ELASTIC, "1"], {"b": above, "c": below}, "")
        for above, below in [(1, 1), (1, 3), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1), (4, 4)]
    ]
    + [(["1", "2", ELASTIC, "1"], {"c": count}, OWN) for count in (1, 2, 3, 4)]
    + [
        ([ELASTIC, "3", ELASTIC], {"a": first, "c": last}, OWN)
        for first, last in ((1, 3), (3, 1), (3, 3), (2, 4))
    ]
    + [(["2", ELASTIC, "2"], {"a": one, "b": 3, "c": 2}, "") for one in (1, 2)],
)
def test_each_batch_comes_on_one_lane_of_each_input(
    counts: Sequence[str], now: Mapping[str, int], more: str
) -> None:
    workers = started(counts, now, more=more)
    for id in range(1, 300):
        for name in dict.fromkeys(module_of(one.module) for one in workers):
            own = [one for one in workers if module_of(one.module) == name]
            for edge in own[0].sources:
                links = [
                    link
                    for one in own
                    for other in one.sources
                    if other.source == edge.source
                    for link in other.links
                    if link.carries(id)
                ]
                (link,) = links
                above = [one for one in workers if module_of(one.module) == edge.source]
                assert number_of(link.target) == replica_of(id, len(own))
                assert number_of(link.source) == replica_of(id, len(above))
        assert {one.module for one in workers if one.replica == replica_of(id, one.replicas)} == {
            *(link.source for one in workers for link in one.links_in if link.carries(id)),
            *(link.target for one in workers for link in one.links_in if link.carries(id)),
        }, "whoever gets a batch has it from above, and passes it on"


def test_modules_without_replicas_have_no_backend() -> None:
    assert [one.backend for one in modules("121", more=GROUP)] == [None, "gloo", None]


@pytest.mark.parametrize(
    ("more", "counts", "elastic"),
    [
        ("", ["1", "2", "{start: 1, most: 3}", "1"], {"b": 2, "c": 1}),
        (OWN, "2221", {}),
        (OWN, ["2", "2", "{start: 2, most: 2}", "1"], {"c": 2}),
        ("replication: {strategy: codistillation}", "1231", {}),
        (GROUP, "2321", {}),
    ],
)
def test_replicas_may_be_lost_where_the_others_can_go_on(
    more: str, counts: Sequence[str], elastic: dict[str, int]
) -> None:
    assert all(one.elastic == elastic for one in modules(counts, more=more))


def test_the_modules_come_back() -> None:
    before = modules()
    workers = workers_of(before)
    assert modules_of(workers) == before
    assert {module_of(one.module): one.hash for one in workers} == {
        one.module: one.hash for one in before
    }, "one image for all replicas"
    assert workers_of(modules("111")) == modules("111")
    alone, replicated = modules("111")[1], modules("121")[1]
    assert alone.hash == replicated.hash, "the image stays when replicas are added"


@pytest.mark.parametrize(
    ("counts", "more", "message"),
    [
        ("121", "replication: {strategy: best}", "unknown strategy 'best'"),
        (["1", "auto", "1"], "replication: {strategy: codistillation}", "lost if it leaves"),
        ("121", "replication: {strategy: {diloco: {rate: 1}}}", "rate"),
        ("121", "replication: {backend: smoke}", "'gloo' or 'nccl'"),
        ("121", "replication: {strategy: codistillation, backend: gloo}", "has no such mean"),
        ("121", "replication: {strategy: parameter-server, backend: gloo}", "has no such mean"),
        ("121", "replication: {compression: bfloat16, backend: gloo}", "for the gradients of"),
        ("121", f"{ALL_REDUCE}, compression: int8, backend: gloo}}", "bfloat16 and powersgd"),
        (["1", "{most: 2}", "1"], GROUP, "a group of torch.distributed .'gloo'. needs all"),
        ("121", f"{GROUP}\nlinks: {{security: curve}}", "'gloo' does not encrypt"),
        (["1", "2, device: cpu", "1"], f"{ALL_REDUCE}, backend: nccl}}", "'nccl' is for GPUs"),
    ],
)
def test_what_cannot_have_replicas(counts: Sequence[str], more: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        modules(counts, more=more)


@pytest.mark.parametrize(
    ("count", "more", "location", "message"),
    [
        ("2", "data: {workers: 2}", "data.workers", "cannot be loaded ahead"),
        ("2", "links: {on_loss: continue}", "links.on_loss", "would be left out"),
        ("2", "data: {path: 'x-{replica}', streams: true}", "data.streams", "rows cannot continue"),
        ("2", "data: {path: 'x-{replica}', labels: tail}", "data.labels", "of which data set"),
    ],
)
def test_what_a_head_with_replicas_cannot_have(
    count: str, more: str, location: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        modules([count, "1", "1"], more=more)
    assert ".".join(map(str, caught.value.location)).startswith(location)


def test_a_tail_has_replicas_whose_number_may_change() -> None:
    *_, tail = modules(["1", "1", "{start: 1, most: 2}"])
    assert (tail.elastic, tail.replicas) == ({"c": 1}, 2)
    assert [one.module for one in workers_of(modules("212"))] == ["a.1", "a.2", "b", "c.1", "c.2"]


@pytest.mark.parametrize(("written", "most"), [("auto", 4), ("{most: 6, auto: true}", 6)])
def test_a_number_that_follows_the_load(written: str, most: int) -> None:
    specs = modules(["1", written, "1"])
    assert (specs[0].elastic, specs[1].replicas) == ({"b": 1}, most)
    chain = parse_chain(f"name: net\nmodules: [{{name: a, replicas: {written}, layers: [ReLU]}}]")
    assert chain.modules[0].replicas == ElasticSpec(most=most, auto=True)
    assert ChainSpec.model_validate(chain.model_dump(mode="json")) == chain


def test_heads_are_linked_like_other_replicas() -> None:
    workers = started("231")
    assert [one.module for one in workers] == ["a.1", "a.2", "b.1", "b.2", "b.3", "c"]
    first, second = workers[:2]
    assert first.head == second.head
    assert first.head is not None
    assert [link.target for link in second.links_out] == ["b.1", "b.2", "b.3"]
    assert [(one.source, one.target) for one in first.peers] == [("a.2", "a.1")]
    for id in range(1, 100):
        links = [*first.links_out, *second.links_out]
        ways = [link for link in links if link.carries(id)]
        assert [link.source for link in ways] == [f"a.{replica_of(id, 2)}"]


def test_a_recurrent_layer_needs_all_batches() -> None:
    text = (
        "name: net\ndefaults: {interface: mixed}\nmodules:\n"
        "- {name: a, layers: [{Embedding: {num_embeddings: 8, embedding_dim: 8}}]}\n"
        "- {name: b, replicas: 2, layers: "
        "[{Recurrent: {cell: GRU, input_size: 8, hidden_size: 8}}]}\n"
        "- {name: c, layers: [Flatten, {Linear: {in_features: 64, out_features: 8}}]}\n"
    )
    tokens = int64(8)
    refused(text, INFO.model_copy(update={"sample": tokens}), "a recurrent layer needs all batches")


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("exact", r"module 'a' waits for gradients \(exact\)"),
        ("{delayed: {max_late: 2}}", "module 'a' waits for gradients"),
        ("{exact: {micro_batches: 2}}", "'micro_batches' and 'replicas' exclude each other"),
    ],
)
def test_interfaces_that_wait_leave_nothing_for_replicas(interface: str, message: str) -> None:
    text = (
        f"name: net\ndefaults: {{interface: {interface}}}\nmodules:\n"
        f"- {{name: a, layers: [{LINEAR}]}}\n- {{name: b, replicas: 2, layers: [{LINEAR}]}}\n"
        f"- {{name: c, layers: [{LINEAR}]}}\n"
    )
    refused(text, INFO, message)


def placed(places: str) -> ChainSpec:
    listed = "".join(
        f"- {{name: {name}, replicas: {count}, layers: [{LINEAR}]}}\n"
        for name, count in zip("abc", "121", strict=True)
    )
    placement = f"placement: {{strategy: explicit, map: {{{places}}}}}"
    return parse_chain(f"name: net\n{placement}\nmodules:\n{listed}")


def test_replicas_may_be_placed_one_by_one() -> None:
    placement = placed("a: 0, b.1: 0, b.2: 1, c: 1").placement
    assert [placement.node_of(name) for name in ("a", "b.1", "b.2", "c")] == [0, 0, 1, 1]
    placement = placed("a: 0, b: 1, c: 1").placement
    assert [placement.node_of(name) for name in ("b.1", "b.2")] == [1, 1]
    with pytest.raises(SpecError, match=r"does not place module 'b'"):
        placed("a: 0, b.1: 0, c: 1")
    with pytest.raises(SpecError, match=r"names 'b.3', but the modules are a, b, c"):
        placed("a: 0, b: 0, b.3: 0, c: 1")


def test_streams_of_a_chain_that_predicts() -> None:
    """Behind replicas a worker has for each lane from upstream one to each replica downstream."""
    workers = workers_of(predicting(modules("1111"), replicas={"b": 2, "c": 3}))
    assert [one.module for one in workers] == [FRONT, "a", "b.1", "b.2", "c.1", "c.2", "c.3", "d"]
    front, a, b1, _, _, c2, _, d = workers
    assert targets(front) == ["a"]
    assert targets(a) == ["b.1", "b.2"]
    assert targets(b1) == ["c.1", "c.2", "c.3"]
    assert [link.source for link in c2.links_in] == ["b.1", "b.2"]
    assert targets(c2) == ["d", "d"]
    assert [link.source for link in d.links_in] == ["c.1", "c.2", "c.3"] * 2, "stream by stream"
    assert targets(d) == [FRONT] * 6
    assert not any(one.peers for one in workers)
    out = {link.number: link for one in workers for link in one.links_out}
    assert out == {link.number: link for one in workers for link in one.links_in}
    assert len(out) == 1 + 2 + 6 + 6 + 6
    assert not any(link.carries(1) for link in out.values()), "their senders choose"


def test_streams_cannot_be_joined() -> None:
    text = (
        "name: net\ndefaults: {interface: mixed}\nmodules:\n"
        f"- {{name: a, layers: [{LINEAR}]}}\n- {{name: b, layers: [{LINEAR}]}}\n"
        f"- {{name: c, inputs: [a, b], layers: [Concat, {LINEAR.replace('8', '16', 1)}]}}\n"
        f"- {{name: d, layers: [{LINEAR}]}}\n"
    )
    trained = specs_of(text, INFO)
    for name in "abc":
        with pytest.raises(SpecError, match=r"module 'c' has 2 inputs.*served by replicas"):
            workers_of(predicting(trained, replicas={name: 2}))
    assert len(workers_of(predicting(trained, replicas={"d": 2}))) == 6
