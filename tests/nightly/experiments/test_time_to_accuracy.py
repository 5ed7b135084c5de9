"""The pure parts of ``time_to_accuracy.py``: data, clocks, and what figures say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import time_to_accuracy
import torch
from peers.chain import evaluations
from peers.contenders import Contender
from peers.slow_link import Line
from peers.streams import Stream, write_text
from time_to_accuracy import Bench, Results, Trained, best_peer, table, told

from dni_runtime.run.documents.metrics import MetricsLine, parse_line


def bench(network: str, target: float) -> Bench:
    return Bench(
        network, 2, Path(), Path(), target, every=100, most_batches=1000, most_s=60, step_s=0.01,
        window=None, learn_every=4, program=None,
    )  # fmt: skip


def images(folder: Path, count: int) -> Path:
    x = np.arange(count * 4, dtype=np.uint8).reshape(count, 1, 2, 2)
    y = np.arange(count) % 3
    path = folder / "images.npz"
    np.savez(path, x_train=x, y_train=y, x_eval=x[:5], y_eval=y[:5])
    return path


def test_a_stream_goes_through_all_samples_before_one_comes_again(tmp_path: Path) -> None:
    path = images(tmp_path, 12)
    stream = Stream(True, str(path), length=8, seed=1)
    assert len(stream) == 8
    assert stream.num_classes == 3
    batches = [stream.__getitems__([0] * 4) for _ in range(6)]
    pixels = [x[0, 0, 0].item() for batch in batches for x, _ in batch]
    assert len(set(pixels[:12])) == len(set(pixels[12:])) == 12
    assert pixels[:12] != pixels[12:], "in another order"
    again = Stream(True, str(path), length=100, seed=1)
    assert [again[0][0][0, 0, 0].item() for _ in range(12)] == pixels[:12]
    other = Stream(True, str(path), length=100, seed=2)
    assert [other[0][0][0, 0, 0].item() for _ in range(12)] != pixels[:12]


def test_a_stream_of_images_is_normalised_and_evaluated_in_order(tmp_path: Path) -> None:
    path = images(tmp_path, 12)
    train = Stream(True, str(path), length=12, seed=1)
    x_BX = torch.stack([x for x, _ in train.__getitems__(list(range(12)))])
    assert x_BX.mean().abs() < 1e-6
    assert x_BX.std(unbiased=False) == pytest.approx(1, abs=1e-6)
    held_out = Stream(False, str(path), length=12, seed=1)
    assert len(held_out) == 5
    assert [int(y) for _, y in held_out.__getitems__([0, 1, 2, 3, 4])] == [0, 1, 2, 0, 1]


def test_windows_of_a_text(tmp_path: Path) -> None:
    text = bytes(np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8))
    path = write_text(tmp_path, text, 64)
    with np.load(path) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    assert found["x_train"].dtype == np.int64
    joined = text.find(bytes(found["x_train"][7].astype(np.uint8)))
    assert text[joined + 1 : joined + 65] == bytes(found["y_train"][7].astype(np.uint8))
    train = {bytes(x.astype(np.uint8)) for x in found["x_train"]}
    held_out = {bytes(x.astype(np.uint8)) for x in found["x_eval"]}
    assert not train & held_out
    assert 10 <= len(train) / len(held_out) <= 16
    stream = Stream(True, str(path), length=10, seed=0)
    assert stream[0][0].dtype == torch.int64
    assert stream.num_classes == 256


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too short"):
        write_text(tmp_path, b"x" * 1000, 64)


def test_the_clock_of_a_chain_stands_while_it_is_evaluated() -> None:
    def line(kind: str, time: float, **more: Any) -> MetricsLine:
        found = parse_line(json.dumps({"kind": kind, "time": time, **more}).encode())
        assert found is not None
        return found

    lines = [
        line("start", 100.0), line("train", 101.0), line("epoch", 103.0),
        line("eval", 110.0, step=60, accuracy=0.5), line("epoch", 114.0),
        line("eval", 121.0, step=120, accuracy=0.6), line("train", 130.0),
    ]  # fmt: skip
    assert evaluations(lines, "accuracy") == [
        {"batches": 60, "train_s": 3.0, "accuracy": 0.5},
        {"batches": 120, "train_s": 7.0, "accuracy": 0.6},
    ]


def test_the_target_is_met_at_the_first_evaluation_that_meets_it() -> None:
    accuracies = [{"accuracy": value} for value in (None, 0.97, 0.98, 0.99)]
    assert bench("mlp-256", 0.98).met(accuracies) is accuracies[2]
    assert bench("mlp-256", 0.98).met(accuracies[:2]) is None
    bits = [{"bits_per_character": value} for value in (None, 8.0, 2.5, 2.6)]
    assert bench("lm", 2.5).met(bits) is bits[2]


def test_the_best_peer_is_synchronous_and_there_with_every_seed() -> None:
    line, one = Line(delay_ms=20), Contender("single-1")
    ddp, gpipe, chain, local = map(Contender, ("ddp", "gpipe-1", "chain", "local-sgd-8"))
    results: Results = {
        (Line(), one): [Trained(40.0, 900, 0.04)] * 2,
        (line, ddp): [Trained(5.0, 900, 0.006), Trained(batch_s=0.006)],
        (line, gpipe): [Trained(20.0, 900, 0.02), Trained(30.0, 1000, 0.03)],
        (line, local): [Trained(4.0, 900, 0.02)] * 2,
        (line, chain): [Trained(5.0, 1100, 0.005, window=8), Trained(10.0, 1200, 0.008, window=8)],
    }
    assert best_peer(results, line) == gpipe
    header, *rows = table(results, line, [one, ddp, gpipe, local, chain])
    assert "sooner than gpipe-1" in header
    assert rows[0].split()[:6] == ["single-1", "backprop", "2/2", "900", "(900-900)", "40.0"]
    assert "1/2" in rows[1]
    assert "7.5 (5.0-10.0)" in rows[4]
    assert "3.50 (3.00-4.00)" in rows[4]
    assert best_peer(results, Line()) is None


def test_what_is_told_of_a_training() -> None:
    evaluated = [{"bits_per_character": 1.5}] * 2
    assert told(Trained(error="E: no"), bench("lm", 1)) == "E: no"
    assert told(Trained(evaluations=evaluated), bench("lm", 0.5)).endswith("200 batches: 1.5, 1.5")
    assert told(Trained(2.0, 100, 0.02), bench("lm", 1)).startswith("2.0 s, 100 batches")


@pytest.mark.parametrize("argv", [["--seeds", "0"], ["--text", "/no/such/file"], ["--every", "x"]])
def test_bad_options(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        time_to_accuracy.parse(argv)
