#!/usr/bin/env python3
"""Seconds to a test accuracy on MNIST over a slow line: samples needed, over measured samples/s.

Synchronous contenders compute what plain backpropagation computes, so all of them need the samples
that it needs; a chain needs those of the same chain in one process whose true gradients are as
late as its window allows. Speeds are those that ``scripts/bench_peers.py --json FILE`` measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from peers.chain import CHAINS, chain_spec
from peers.networks import NETWORKS
from peers.slow_link import Line
from reproduce_paper import folder_of

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.resolve import worker_specs
from dni_runtime.data import describe, open_data
from dni_runtime.spec import ChainSpec

EVERY = 30
"""Batches between evaluations."""


def samples_needed(
    name: str | None, network: str, data: str, window: int, target: float, seed: int, limit: int
) -> int | None:
    """Training samples until the target is met; None when it is not within so many epochs.

    Args:
        name: The chain among the contenders; None for backpropagation.
        network: Name of the network.
        data: Folder of MNIST.
        window: Batches by which true gradients are late.
        target: Accuracy, from 0 to 1.
        seed: The chain's seed.
        limit: Epochs.
    """
    document = chain_spec(
        name or "chain",
        NETWORKS[network],
        Path(),
        cut=None,
        window=max(window, 1),
        learn_every=4,
        remote=False,
    )
    document["seed"] = seed
    document["data"] = {
        "dataset": "mnist",
        "path": data,
        "batch_size": NETWORKS[network].batch,
        "flatten": NETWORKS[network].flatten,
        "drop_last": True,
    }
    chain = ChainSpec.model_validate(document)
    workers = worker_specs(chain, describe(chain.data, Path()))
    source = open_data(chain.data, Path(), seed=seed)
    trained = Backprop(workers) if name is None else LocalChain(workers, delay=window)
    samples = batches = 0
    for epoch in range(1, limit + 1):
        for x_BX, y_BY in source.train_batches(epoch):
            trained.train_batch(x_BX, y_BY)
            samples += len(x_BX)
            batches += 1
            if batches % EVERY == 0:
                found = evaluate(trained.predict, source.eval_batches(), workers[-1])
                if found["accuracy"] >= target:
                    return samples
        trained.end_epoch()
    return None


def main() -> None:
    """Train, and print a table for each line that was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path, help="what bench_peers.py --json wrote")
    parser.add_argument("--network", choices=list(NETWORKS), default="mlp-1024")
    parser.add_argument("--target", type=float, default=0.98)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8, help="give up after so many")
    parser.add_argument("--mnist", help="folder of the four IDX files (default: fetched)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = folder_of("mnist", arguments.mnist)
    known: dict[tuple[str | None, int], float | None] = {}

    def needed(name: str | None, window: int) -> float | None:
        if (name, window) not in known:
            counts = [
                samples_needed(
                    name, arguments.network, data, window, arguments.target, seed, arguments.epochs
                )
                for seed in range(arguments.seeds)
            ]
            reached = [count for count in counts if count is not None]
            known[name, window] = (
                statistics.median(reached) if len(reached) == len(counts) else None
            )
        return known[name, window]

    for line in json.loads(arguments.figures.read_text())["lines"]:
        print(f"\n{Line(line['delay_ms'], line['rate_mbit'] or 0)}, {100 * arguments.target:g} %:")
        print("| contender | samples/s | samples needed | seconds |\n|---|---|---|---|")
        rows: list[tuple[float, str]] = []
        for row in line["contenders"]:
            if row["samples_per_s"] is not None:
                rows.append(_row(row, needed))
        for _, text in sorted(rows):
            print(text, flush=True)


def _row(row: dict[str, Any], needed: Any) -> tuple[float, str]:
    name, rate = row["name"], row["samples_per_s"]["median"]
    window = row["runs"][0]["details"].get("window", 0)
    samples = needed(name if name in CHAINS else None, window if name in CHAINS else 0)
    if samples is None:
        return float("inf"), f"| {name} | {rate:.0f} | not reached | |"
    return samples / rate, f"| {name} | {rate:.0f} | {samples:.0f} | {samples / rate:.1f} |"


if __name__ == "__main__":
    main()
