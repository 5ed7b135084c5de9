"""The pure parts of ``bench_peers.py``: what is asked for, and what figures say."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import bench_peers
import pytest
import torch
from peers.build import build, build_parts, example, output_shapes
from peers.chain import LEAST_WINDOW, chain_spec, module_names, prefixes_of, window_for
from peers.contenders import CHAINS, CONTENDERS, Contender, computes, in_flight, kind_of
from peers.networks import NETWORKS, data_spec, write_data, write_sources
from peers.options import chosen, contenders_of, listed, parse_delay, parse_rate
from peers.process import timed
from peers.processes import Measured, last_error
from peers.report import Outcome, best_peer, ratios, summarize, table
from peers.slow_link import Line, Link

from dni_runtime.plan.prepare import prepare

MLP = NETWORKS["mlp-1024"]


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("unlimited", 0), ("1gbit", 1000), ("100mbit", 100), ("2.5gbit", 2500), ("500kbit", 0.5)],
)
def test_rates(text: str, mbit: float) -> None:
    assert parse_rate(text) == mbit


@pytest.mark.parametrize("text", ["", "fast", "100", "0mbit", "-1gbit", "mbit"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate|convert"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["-1", "1e9", "nan", "soon"])
def test_no_delays(text: str) -> None:
    with pytest.raises(ValueError, match=r"delay|convert"):
        parse_delay(text)


def test_values_with_commas() -> None:
    assert listed(int)("1,2") == [1, 2]
    with pytest.raises(argparse.ArgumentTypeError, match="'x'"):
        listed(int)("1,x")


def test_contenders_are_chosen_by_patterns() -> None:
    assert chosen("chain,single-*") == ["single-1", "single-2", "chain"]
    assert chosen("2bw-*,2bw-2,diloco-500,1f1b-2,gpipe-4,ddp") == [
        "ddp", "gpipe-4", "1f1b-2", "diloco-500", "2bw-2", "2bw-4", "2bw-8",
    ]  # fmt: skip
    for name in ("chian", "diloco-0", "gpipe-3", "2bw"):
        with pytest.raises(ValueError, match=f"no contender '{name}'"):
            chosen(f"ddp,{name}")


def test_only_two_parts_are_cut_elsewhere() -> None:
    names = ["ddp", "gpipe-1", "zbv-2", "diloco-64", "async-1f1b", "chain"]
    assert [str(one) for one in contenders_of(names, [5, 6], [7])] == [
        "ddp", "gpipe-1 @5", "gpipe-1 @6", "zbv-2", "diloco-64", "async-1f1b @5", "async-1f1b @6",
        "chain @7",
    ]  # fmt: skip


def test_processes_beside_chains_of_four() -> None:
    names = ["single-2", "ddp", "gpipe-1", "zbv-2", "local-sgd-8", "2bw-4", "chain"]
    found = contenders_of(names, [None], [None], modules=4, processes=[4, 2])
    assert {str(one): one.count(4) for one in found} == {
        "single-2": 1, "ddp": 4, "ddp x2": 2, "gpipe-1": 4, "gpipe-1 x2": 2, "zbv-2": 2,
        "local-sgd-8": 2, "2bw-4": 4, "2bw-4 x2": 2, "chain": 4,
    }  # fmt: skip
    assert len(contenders_of(names, [None], [None], modules=4)) == len(names)


@pytest.mark.parametrize(
    "argv",
    [
        ["--processes", "3"],
        ["--chain-split", "13"],
        ["--contenders", "2bw-3"],
        ["--contenders", "nobody"],
        ["--modules", "3"],
    ],
)
def test_what_does_not_fit_together(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_peers.parse(argv)


def test_which_peers_compute_what_backpropagation_computes() -> None:
    same = [name for name in CONTENDERS if computes(name) == "backprop"]
    assert same == [
        name
        for name in CONTENDERS
        if kind_of(name)[0] in ("single", "ddp", "pipeline") or name.startswith("exact")
    ]
    assert computes("diloco-500") == "averages"
    assert computes("2bw-8") == computes("async-1f1b") == "old weights"
    assert computes("chain-int8") == "synthetic gradients"
    assert computes("delayed") == "late gradients"


def test_speeds_are_of_whole_periods() -> None:
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1

    found = timed(step, 0, 0, period=64)
    assert found["steps"] == 64
    assert taken == 7 + 2 * 64


def test_batches_under_way_in_asynchronous_pipelines() -> None:
    def under_way(name: str) -> list[int]:
        return [in_flight(name, stage, 4) for stage in range(4)]

    assert under_way("async-1f1b") == [4, 3, 2, 1], "as late as there are stages below"
    assert under_way("async-1f1b-8") == [8, 7, 2, 1], "more before the line"
    assert under_way("2bw-8") == [9, 8, 2, 1], "none waits for the next one of the stage above"
    assert under_way("2bw-2") == [3, 2, 1, 1], "no more than two versions of the weights allow"


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_fit_together(name: str) -> None:
    network = NETWORKS[name]
    for count in (1, 2, 4):
        h_BH = example(network, 2, "meta")
        parts, shapes = network.parts(count), output_shapes(network, count)
        assert sum(map(len, parts)) == len(network.layers)
        for index, part in enumerate(parts):
            with torch.device("meta"):
                h_BH = build(part)(h_BH)
            assert h_BH.shape[1:] == shapes[index]
            if count == 2 and index == 0:
                assert h_BH[0].numel() == network.activation
        assert shapes[-1] == ((64, 256) if network.tokens else (10,))
    with pytest.raises(ValueError, match="not 3"):
        network.parts(3)


def test_weights_do_not_depend_on_the_cuts() -> None:
    network = NETWORKS["mlp-256"]
    (whole,) = build_parts(network, 1, [0], seed=3).values()
    parts = build_parts(network, 4, [3, 1], seed=3)
    pieces = [whole[9:], whole[3:6]]
    for part, piece in zip(parts.values(), pieces, strict=True):
        for own, same in zip(part.parameters(), piece.parameters(), strict=True):
            assert torch.equal(own, same)
    assert not torch.equal(whole[3].weight, whole[6].weight), "each layer has its own"
    (other,) = build_parts(network, 1, [0], seed=4).values()
    assert not torch.equal(whole[0].weight, other[0].weight)


def test_tokens_do_not_see_what_follows() -> None:
    (model,) = build_parts(NETWORKS["lm"], 1, [0]).values()
    x_BT = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(0))
    y_BT = x_BT.clone()
    y_BT[0, 40] += 1
    p_BTV, q_BTV = model(x_BT), model(y_BT % 256)
    torch.testing.assert_close(p_BTV[:, :40], q_BTV[:, :40])
    assert not torch.allclose(p_BTV[:, 40:], q_BTV[:, 40:])


@pytest.mark.parametrize("modules", [2, 4])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("network", NETWORKS)
def test_chain_files_are_valid(network: str, name: str, modules: int, tmp_path: Path) -> None:
    write_data(NETWORKS[network], tmp_path, samples=256)
    write_sources(tmp_path)
    spec = chain_spec(
        name, NETWORKS[network], data_spec(NETWORKS[network], tmp_path), modules=modules, cut=None,
        window=11, learn_every=4, remote=True,
    )  # fmt: skip
    (tmp_path / "chain.yaml").write_text(json.dumps(spec))
    workers = prepare(tmp_path / "chain.yaml").workers
    assert len(workers) == modules
    for above, below in itertools.pairwise(workers):
        assert above.links.window == 11
        every = {"local": 0} | dict.fromkeys(("chain", "mixed", "true-lessons"), 4)
        kind = name.removesuffix("-bf16").removesuffix("-int8")
        assert above.gradients_in == below.sources[0].gradients == every.get(kind, 1)


def test_half_of_the_modules_are_at_each_end_of_the_line() -> None:
    link = Link({"pid": 5, "net": [7, 8], "user": False})
    ends = prefixes_of(module_names(4), link)
    assert list(ends) == ["head", "middle-1", "middle-2", "tail"]
    assert [prefix[1][-1] for prefix in ends.values()] == ["7", "7", "8", "8"]
    assert prefixes_of(module_names(2), None) == {}
    ends = prefixes_of(["head.1", "head.2", "tail.1", "tail.2"], link)
    assert [prefix[1][-1] for prefix in ends.values()] == ["7", "8", "7", "8"], "a chain at each"


def test_chains_with_replicas() -> None:
    given: dict[str, Any] = {"cut": None, "window": 8, "learn_every": 4, "remote": True}
    spec = chain_spec("mixed+diloco-64", MLP, {}, **given)
    assert spec["replication"] == {"strategy": "diloco", "every": 64}
    assert [(one["name"], one["replicas"]) for one in spec["modules"]] == [("head", 2), ("tail", 2)]
    (module,) = chain_spec("whole+local-sgd-8", MLP, {}, **given)["modules"]
    assert (module["replicas"], len(module["layers"])) == (2, len(MLP.layers))
    assert kind_of("whole+local-sgd-8") == ("chain", 8)
    assert computes("whole+local-sgd-8") == "backprop, averages"
    for name, why in (("whole", "no contender 'whole'"), ("exact-4+diloco-8", "have no replicas")):
        with pytest.raises(ValueError, match=why):
            kind_of(name)


def test_the_window_covers_a_round_trip() -> None:
    def window(line: Line, step_s: float, name: str = "chain") -> int:
        return window_for(name, MLP, line, step_s, 4)

    assert window(Line(), 0.02) == LEAST_WINDOW
    assert window(Line(delay_ms=50), 0.005) == 22
    # 1 MiB at 100 Mbit/s takes 84 ms, a step less: the line is the slower one
    assert window(Line(delay_ms=500, rate_mbit=100), 0.005) == 16
    assert window(Line(delay_ms=500, rate_mbit=100), 0.005, "chain-bf16") == 28
    assert window(Line(delay_ms=500, rate_mbit=100), 0.005, "delayed") == 16


def outcome(*rates: float | None) -> Outcome:
    return Outcome(
        runs=[None if rate is None else Measured(rate, 0.001, (0.5, 0.4), {}) for rate in rates],
        foreign=[0.1 for rate in rates if rate is not None],
        error="RuntimeError: it broke" if None in rates else None,
    )


def test_ratios_are_taken_within_a_repetition() -> None:
    assert ratios([2.0, None, 8.0], [1.0, 1.0, 2.0]) == [2.0, 4.0]


def test_summary() -> None:
    outcomes = {
        Contender("single-2"): outcome(100, 200, 300),
        Contender("ddp"): outcome(None, None, None),
        Contender("zbv-2"): outcome(50, 60, 70),
        Contender("gpipe-1", 5): outcome(10, 20, 80),
        Contender("chain"): outcome(200, 200, 210),
    }
    assert best_peer(outcomes) == Contender("zbv-2")
    line = Line(delay_ms=20)
    found = summarize(line, outcomes, {"rtt_ms": 40.1, "mbit_per_s": 7000.0})
    chain = found["contenders"][-1]
    assert chain["samples_per_s"] == {"median": 200, "low": 200, "high": 210}
    assert chain["over_best_peer"] == {"median": 200 / 60, "low": 3, "high": 4}
    assert chain["over_single"] == {"median": 1, "low": 0.7, "high": 2}
    assert chain["cores"] == [0.5, 0.4]
    assert [row["computes"] for row in found["contenders"]][-2:] == [
        "backprop",
        "synthetic gradients",
    ]
    json.dumps(found)
    text = table(line, found)
    assert "round trip 40.1 ms" in text
    assert "3.33 (3.00-4.00)" in text
    assert "ddp: RuntimeError: it broke" in text


def test_peers_that_compute_something_else_are_a_base_of_their_own() -> None:
    outcomes = {
        Contender("ddp", processes=2): outcome(10),
        Contender("local-sgd-8"): outcome(90),
        Contender("async-1f1b"): outcome(80),
        Contender("single-2"): outcome(200),
        Contender("mixed"): outcome(180),
    }
    assert best_peer(outcomes) == Contender("ddp", processes=2)
    assert best_peer(outcomes, synchronous=False) == Contender("local-sgd-8")
    found = summarize(Line(), outcomes, {})
    assert found["contenders"][1]["over_best_peer"]["median"] == 9
    assert found["contenders"][4]["over_best_other"]["median"] == 2
    assert "/ local-sgd-8" in table(Line(), found)
    assert "ddp x2" in table(Line(), found)


def test_a_traceback_in_one_line() -> None:
    assert last_error('Traceback:\n  File "x"\nValueError: no\nwarned: leak') == "ValueError: no"
    assert last_error("just this\n") == "just this"
    assert last_error("") == ""
