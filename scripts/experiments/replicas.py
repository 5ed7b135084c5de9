#!/usr/bin/env python3
"""Train a chain whose modules between head and tail have replicas, beside one without.

Each run sees the same batches in the same order. With ``--slow`` a layer that waits so many
milliseconds in training is added to each of these modules: it stands for a module that takes longer
than the others on a device of its own, which this machine has not.

Usage: replicas.py definitions/chains/fashion-cdni.yaml --data build/fashion-mnist \\
           [--replicas 1,2,4] [--strategies local-sgd,diloco] [--every 32] [--seeds 1] [--slow 20]
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


def trained(folder: Path, document: dict[str, Any], data: Path) -> tuple[float, float]:
    """Train a chain; return its accuracy and its samples per second."""
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    argv = [sys.executable, "-m", "dnictl", "up", path, "--backend", "process"]
    subprocess.run([*argv, "--data", data], check=True, cwd=folder, capture_output=True)
    (run,) = (folder / "runs").iterdir()
    figures = Run.open(run).status()
    return figures.accuracy or 0.0, figures.samples_per_s or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--strategies", default="local-sgd,diloco")
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slow", type=int, default=0, metavar="MS")
    given = parser.parse_args()
    base = yaml.safe_load(given.chain.read_text())
    if given.epochs is not None:
        base["epochs"] = given.epochs
    print("replicas  strategy   accuracy  (lowest-highest)  samples/s", flush=True)
    for count in map(int, given.replicas.split(",")):
        for strategy in given.strategies.split(",") if count > 1 else ["none"]:
            found = []
            for seed in range(given.seeds):
                document = yaml.safe_load(yaml.safe_dump(base)) | {"seed": seed}
                for module in document["modules"][1:-1]:
                    module["replicas"] = count
                    if given.slow:
                        layer = {"import": "waits:Waits", "args": {"ms": given.slow}}
                        module["layers"] = [*module["layers"], layer]
                if count > 1:
                    document["replication"] = {"strategy": strategy, "every": given.every}
                with tempfile.TemporaryDirectory() as name:
                    (Path(name) / "waits.py").write_text(WAITS)
                    found.append(trained(Path(name), document, given.data.absolute()))
            accuracies = [100 * accuracy for accuracy, _ in found]
            print(
                f"{count:8}  {strategy:9}  {statistics.mean(accuracies):8.2f}  "
                f"({min(accuracies):.2f}-{max(accuracies):.2f})  "
                f"{statistics.mean(pace for _, pace in found):12,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
