#!/usr/bin/env python3
"""Accuracy against the age of true gradients, in one process (MNIST, every layer a module).

The networks of scripts/reproduce_paper.py; each true gradient reaches the module that it teaches so
many training batches late. Trainings that are in the results file already are not run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compare_synthesizers import train
from remember import accuracies, grid, parser, table
from reproduce_paper import ROOT, chain_spec, folder_of

from dni_runtime.spec import ChainSpec

NESTEROV = {"NAdam": {"lr": 2e-3, "betas": [0.99, 0.999]}}
SLOW = {"Adam": {"lr": 5e-4}}
"""What shrinking gradients by their age comes to when all are equally late, and Adam divides."""

ACCUMULATED = {"late_optimizers:Accumulated": {"lr": 2e-3, "every": 4}}
AHEAD = {"late_optimizers:LookAhead": {"lr": 2e-3, "steps": "delay"}}

METHODS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "delayed": ("delayed", None),
    "delayed-nadam": ("delayed", NESTEROV),
    "delayed-slow": ("delayed", SLOW),
    "delayed-accumulated": ("delayed", ACCUMULATED),
    "delayed-ahead": ("delayed", AHEAD),
    "cDNI": ("synthetic", None),
    "mixed": ("mixed", None),
    "local": ("local", None),
}
"""Label: gradient interface, and the modules' optimizer where it is not Adam."""


def train_late(one: dict[str, Any], data: str) -> float:
    """Test accuracy in per cent of one training."""
    interface, optimizer = METHODS[one["method"]]
    # The window bounds how many batches wait for their gradient: it must not be what is measured.
    spec = chain_spec(one["layers"], one["epochs"], max(4, one["delay"]), data)
    spec["seed"] = one["seed"]
    spec["defaults"]["interface"] = interface
    if optimizer is not None:
        spec["defaults"]["optimizer"] = {
            name: {key: one["delay"] if value == "delay" else value for key, value in args.items()}
            for name, args in optimizer.items()
        }
    return train(ChainSpec.model_validate(spec), Path(), one["delay"])[0]


def main() -> None:
    """Train what is missing, and print the table."""
    options = parser(__doc__, ROOT / "build" / "staleness.jsonl")
    options.add_argument("--delays", default="0,8,32,64,256", help="in batches")
    options.add_argument("--methods", default=",".join(METHODS), help="of: %(default)s")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    data = folder_of("mnist", arguments.mnist)
    delays = map(int, arguments.delays.split(","))
    wanted = grid(arguments, method=arguments.methods.split(","), delay=delays)
    results = accuracies(arguments.results, wanted, lambda one: train_late(one, data))
    print(table("delay in batches", results, "method", "delay"))


if __name__ == "__main__":
    main()
