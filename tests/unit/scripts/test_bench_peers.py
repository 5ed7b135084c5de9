"""The pure parts of ``scripts/bench_peers.py``: what is asked for, and what figures say."""

from __future__ import annotations

import json
from pathlib import Path

import bench_peers
import pytest
import torch
from peers.chain import CHAINS, LEAST_WINDOW, chain_spec, window_for
from peers.networks import NETWORKS, write_data
from peers.report import Contender, Outcome, best_peer, ratios, summarize, table
from peers.slow_link import Line
from peers.synchronous import Measured, build, last_error

from dni_runtime.launch.prepare import prepare

MLP = NETWORKS["mlp-1024"]


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("unlimited", 0), ("1gbit", 1000), ("100mbit", 100), ("2.5gbit", 2500), ("500kbit", 0.5)],
)
def test_rates(text: str, mbit: float) -> None:
    assert bench_peers.parse_rate(text) == mbit


@pytest.mark.parametrize("text", ["", "fast", "100", "0mbit", "-1gbit", "mbit"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate|convert"):
        bench_peers.parse_rate(text)


@pytest.mark.parametrize("text", ["-1", "1e9", "nan", "soon"])
def test_no_delays(text: str) -> None:
    with pytest.raises(ValueError, match=r"delay|convert"):
        bench_peers.parse_delay(text)


def test_contenders_are_chosen_by_patterns() -> None:
    assert bench_peers.chosen("chain,single-*") == ["single-1", "single-2", "chain"]
    with pytest.raises(ValueError, match="no contender 'chian'"):
        bench_peers.chosen("ddp,chian")


def test_only_two_parts_are_cut_elsewhere() -> None:
    found = bench_peers.contenders_of(["ddp", "gpipe-1", "zbv-2", "chain"], [5, 6], [7])
    assert [str(contender) for contender in found] == [
        "ddp", "gpipe-1 @5", "gpipe-1 @6", "zbv-2", "chain @7",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_fit_together(name: str) -> None:
    network = NETWORKS[name]
    x_BX = torch.zeros((2, 784) if network.flatten else (2, 1, 28, 28), device="meta")
    for count in (2, 4):
        h_BH = x_BX
        parts = network.parts(count)
        assert sum(map(len, parts)) == len(network.layers)
        for index, part in enumerate(parts):
            with torch.device("meta"):
                h_BH = build(part)(h_BH)
            if count == 2 and index == 0:
                assert h_BH[0].numel() == network.activation
        assert h_BH.shape == (2, 10)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("network", NETWORKS)
def test_chain_files_are_valid(name: str, network: str, tmp_path: Path) -> None:
    write_data(tmp_path, samples=256)
    spec = chain_spec(
        name, NETWORKS[network], tmp_path, cut=None, window=11, learn_every=4, remote=True
    )
    (tmp_path / "chain.yaml").write_text(json.dumps(spec))
    head, tail = prepare(tmp_path / "chain.yaml").workers
    assert head.links.window == 11
    assert head.gradients_in == tail.gradients_out == (1 if name.startswith("delayed") else 4)


def test_the_window_covers_a_round_trip() -> None:
    def window(line: Line, step_s: float, dtype: str = "float32") -> int:
        return window_for(MLP, dtype, line, step_s, 4)

    assert window(Line(), 0.02) == LEAST_WINDOW
    assert window(Line(delay_ms=50), 0.005) == 22
    # 1 MiB at 100 Mbit/s takes 84 ms, a step less: the line is the slower one
    assert window(Line(delay_ms=500, rate_mbit=100), 0.005) == 16
    assert window(Line(delay_ms=500, rate_mbit=100), 0.005, "bfloat16") == 28


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
    json.dumps(found)
    text = table(line, found)
    assert "round trip 40.1 ms" in text
    assert "3.33 (3.00-4.00)" in text
    assert "ddp: RuntimeError: it broke" in text


def test_a_traceback_in_one_line() -> None:
    assert last_error('Traceback:\n  File "x"\nValueError: no\nwarned: leak') == "ValueError: no"
    assert last_error("just this\n") == "just this"
    assert last_error("") == ""
