#!/usr/bin/env python3
"""Accuracy against the age of true gradients, in one process (MNIST, every layer a module).

The networks of scripts/reproduce_paper.py; each true gradient reaches the module that it teaches so
many training batches late. Trainings that are in the results file already are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from compare_synthesizers import train
from reproduce_paper import ROOT, chain_spec, fetch

from dni_runtime.spec import ChainSpec
from dni_runtime.spec.load import parse_choice

NESTEROV = {"NAdam": {"lr": 2e-3, "betas": [0.99, 0.999]}}
METHODS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "delayed": ("delayed", None),
    "delayed-nadam": ("delayed", NESTEROV),
    "cDNI": ("synthetic", None),
    "mixed": ("mixed", None),
    "local": ("local", None),
}
"""Label: gradient interface, and the modules' optimizer where it is not Adam."""

Key = tuple[str, int, int]
"""Method, delay, seed."""


def accuracy(arguments: argparse.Namespace, data: str, key: Key) -> float:
    """Test accuracy in per cent of one training."""
    method, delay, seed = key
    text, optimizer = METHODS[method]
    # The window bounds how many batches wait for their gradient: it must not be what is measured.
    spec = chain_spec(arguments.layers, arguments.epochs, max(4, delay), data)
    spec["seed"] = seed
    if optimizer is not None:
        spec["defaults"]["optimizer"] = optimizer
    chain = ChainSpec.model_validate(spec)
    interface = parse_choice(text)
    modules = [m.model_copy(update={"interface": interface}) for m in chain.modules[:-1]]
    chain = chain.model_copy(update={"modules": (*modules, chain.modules[-1])})
    return train(chain, Path(), delay)[0]


def table(results: dict[Key, float]) -> str:
    """Means and ranges over the seeds as a Markdown table."""
    delays = sorted({delay for _, delay, _ in results})
    lines = ["| delay in batches | " + " | ".join(map(str, delays)) + " |"]
    lines.append("|---|" + "---|" * len(delays))
    for method in dict.fromkeys(method for method, _, _ in results):
        cells = []
        for delay in delays:
            values = [v for (m, d, _), v in results.items() if (m, d) == (method, delay)]
            if not values:
                cells.append("")
                continue
            spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.2f}{spread}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4, help="number of hidden layers")
    parser.add_argument("--delays", default="0,8,32,64,256", help="in batches")
    parser.add_argument("--methods", default=",".join(METHODS), help="of: %(default)s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "staleness.jsonl")
    parser.add_argument("--mnist", help="folder of the four IDX files (default: fetched)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = str(Path(arguments.mnist).resolve()) if arguments.mnist else fetch()
    wanted = [
        (method, int(delay), seed)
        for seed in range(arguments.seeds)
        for method in arguments.methods.split(",")
        for delay in arguments.delays.split(",")
    ]
    same = {"layers": arguments.layers, "epochs": arguments.epochs}
    results: dict[Key, float] = {}
    if arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            row = json.loads(line)
            if same.items() <= row.items():
                results[row["method"], row["delay"], row["seed"]] = row["accuracy"]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for key in wanted:
        if key not in results:
            results[key] = accuracy(arguments, data, key)
            method, delay, seed = key
            row = {**same, "method": method, "delay": delay, "seed": seed, "accuracy": results[key]}
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{method}, {delay} batches, seed {seed}: {results[key]:.2f} %", file=sys.stderr)
    print(table({key: results[key] for key in wanted}))


if __name__ == "__main__":
    main()
