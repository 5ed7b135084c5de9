#!/usr/bin/env python3
"""Train a chain whose modules between head and tail have replicas, beside one without.

Each run sees the same batches in the same order. A way to share is a strategy, its options and a
compression as in ``replication`` of chain.yaml. MiB: all that the replicas of a module have sent
each other, of all modules. With ``--slow`` a layer that waits so many milliseconds in training is
added to each of these modules: it stands for a module that takes longer than the others on a device
of its own, which this machine has not.

Usage: replicas.py definitions/chains/fashion-cdni.yaml --data build/fashion-mnist \\
           [--replicas 1,2,4] [--every 32] [--epochs 15] [--seeds 1] [--slow 20] \\
           ['local-sgd' 'diloco' 'all-reduce, every: 2' 'local-sgd, compression: int8' ...]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from dni_runtime import Run
from dni_runtime.documents.metrics import TrainLine, read_metrics

WAITS = """\
import time
from torch import nn


class Waits(nn.Module):
    def __init__(self, ms):
        super().__init__()
        self.ms = ms

    def forward(self, x):
        if self.training:
            time.sleep(self.ms / 1000)
        return x
"""


WAYS = ("local-sgd", "diloco")
"""What is measured where nothing is named."""


def trained(folder: Path, document: dict[str, Any], data: Path) -> tuple[float, float, float]:
    """Train a chain; return its accuracy, its samples per second, and MiB between replicas."""
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    argv = [sys.executable, "-m", "dnictl", "up", path, "--backend", "process"]
    subprocess.run([*argv, "--data", data], check=True, cwd=folder, capture_output=True)
    (run,) = (folder / "runs").iterdir()
    figures, sent = Run.open(run).status(), 0
    for file in (run / "metrics").glob("*.jsonl"):
        sent += max((line.shared_bytes or 0 for line in read_metrics(file, TrainLine)), default=0)
    return figures.accuracy or 0.0, figures.samples_per_s or 0.0, sent / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("ways", nargs="*", default=WAYS, metavar="WAY")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--every", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slow", type=int, default=0, metavar="MS")
    given = parser.parse_intermixed_args()
    base = yaml.safe_load(given.chain.read_text())
    if given.epochs is not None:
        base["epochs"] = given.epochs
    print("replicas  accuracy  (lowest-highest)  samples/s      MiB  how they share", flush=True)
    for count in map(int, given.replicas.split(",")):
        for way in given.ways if count > 1 else ["-"]:
            found = []
            for seed in range(given.seeds):
                document = yaml.safe_load(yaml.safe_dump(base)) | {"seed": seed}
                for module in document["modules"][1:-1]:
                    module["replicas"] = count
                    if given.slow:
                        layer = {"import": "waits:Waits", "args": {"ms": given.slow}}
                        module["layers"] = [*module["layers"], layer]
                if count > 1:
                    every = {} if given.every is None else {"every": given.every}
                    document["replication"] = every | yaml.safe_load(f"{{strategy: {way}}}")
                with tempfile.TemporaryDirectory() as name:
                    (Path(name) / "waits.py").write_text(WAITS)
                    found.append(trained(Path(name), document, given.data.absolute()))
            accuracies, paces, sent = zip(*found, strict=True)
            print(
                f"{count:8}  {100 * statistics.mean(accuracies):8.2f}  "
                f"({100 * min(accuracies):.2f}-{100 * max(accuracies):.2f})  "
                f"{statistics.mean(paces):13,.0f}  {statistics.mean(sent):7.1f}  {way}",
                flush=True,
            )


if __name__ == "__main__":
    main()
