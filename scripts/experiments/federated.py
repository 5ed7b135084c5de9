#!/usr/bin/env python3
"""Federated clients with two digits each: averages of all, of some, and of those that drifted.

Whole networks as clients: a chain of one module with so many replicas, each with data of its own
that nobody else reads. As in McMahan et al. 2016 (arXiv:1602.05629, sec. 3) each client has two of
MNIST's digits; the network is their "2NN", without normalisation, trained by SGD on batches of 10.
Beside it the same network, alone, on the images of all in random order. An epoch here is one
client's data; ``--passes`` counts those over the data of all.

Usage: federated.py --data build/mnist [--clients 10] [--passes 4] [--every 300] \\
           ['local-sgd' '{federated: {share: 0.5}}' '{dynamic: {threshold: 1.0}}' ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from replicas import shared_mib

from dni_runtime import Run
from dni_runtime.data import open_data
from dni_runtime.spec import DataSpec

WAYS = ("local-sgd", "{federated: {share: 0.5}}", "{dynamic: {threshold: 1.0}}")
CLASSES, DIGITS = 2, 10
ALL = "all"


def write_shards(data: Path, folder: Path, clients: int) -> int:
    """Write each client's images, and all of them; return how many a client has."""
    source = open_data(
        DataSpec(dataset="mnist", path=str(data), flatten=True, batch_size=1000, shuffle=False),
        Path(),
        seed=0,
    )
    (x, y), (x_eval, y_eval) = (
        tuple(torch.cat([torch.as_tensor(one[part]) for one in batches]).numpy() for part in (0, 1))
        for batches in map(list, (source.train_batches(1), source.eval_batches()))
    )
    evaluated = {"x_eval": x_eval, "y_eval": y_eval}
    by_digit = [np.flatnonzero(y == digit) for digit in range(DIGITS)]
    owned = [[(client + one) % DIGITS for one in range(CLASSES)] for client in range(clients)]
    owners = Counter(digit for digits in owned for digit in digits)
    shard = min(len(by_digit[digit]) // count for digit, count in owners.items())
    every: list[Any] = []
    for client, digits in enumerate(owned):
        mine = np.concatenate([by_digit[digit][:shard] for digit in digits])
        for digit in digits:
            by_digit[digit] = by_digit[digit][shard:]
        path = folder / f"owner-{client + 1}.npz"
        np.savez(path, x_train=x[mine], y_train=y[mine], **evaluated)
        every.append(mine)
    mine = np.concatenate(every)
    np.savez(folder / f"owner-{ALL}.npz", x_train=x[mine], y_train=y[mine], **evaluated)
    return CLASSES * shard


def chain(options: argparse.Namespace, way: str | None) -> dict[str, Any]:
    """A chain of one module; without a way to share, of one worker with all data."""
    replicas = 1 if way is None else options.clients
    layers: list[Any] = []
    for before, after in ((784, 200), (200, 200), (200, 10)):
        layers += [{"Linear": {"in_features": before, "out_features": after}}, "ReLU"]
    replication = {"every": options.every, **yaml.safe_load(f"{{strategy: {way}}}")}
    return {
        "name": "federated",
        "seed": 0,
        "data": {
            "dataset": "npz",
            "path": f"owner-{ALL if way is None else '{replica}'}.npz",
            "batch_size": options.batch,
            "drop_last": True,
            "normalize": False,
        },
        "epochs": options.passes * replicas,
        "eval_every": replicas,
        "checkpoint": {"every_epochs": replicas},
        "metrics": ["accuracy"],
        "defaults": {"optimizer": {"SGD": {"lr": options.lr}}},
        **({} if way is None else {"replication": replication}),
        "modules": [{"name": "client", "replicas": replicas, "layers": layers[:-1]}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", default=WAYS, metavar="WAY")
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--every", type=int, default=300, help="batches of all, to an average")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = write_shards(options.data, folder, options.clients)
        total = options.passes * options.clients * (own // options.batch)
        print("accuracy after each pass over the data of all          points      MiB  way")
        for number, way in enumerate((None, *options.ways)):
            path, root = folder / f"{number}.yaml", folder / f"run-{number}"
            path.write_text(yaml.safe_dump(chain(options, way), sort_keys=False))
            argv = [sys.executable, "-m", "dnictl", "up", path, "--backend", "process"]
            done = subprocess.run(
                [*argv, "--run-dir", root], cwd=folder, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stderr)
            found = [one.accuracy or 0.0 for one in Run.open(root).status().evaluations]
            points = 0 if way is None else total // options.every
            curve = "  ".join(f"{100 * one:.2f}" for one in found)
            print(f"{curve:52} {points:8} {shared_mib(root):8.1f}  {way or 'alone'}", flush=True)


if __name__ == "__main__":
    main()
