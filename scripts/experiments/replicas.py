#!/usr/bin/env python3
"""Train a chain whose modules between head and tail, or all, have replicas, beside one without.

Each run sees the same batches in the same order. A way to share is a strategy, its options and a
compression as in ``replication`` of chain.yaml. MiB: all that the replicas of a module have sent
each other, of all modules. With ``--slow`` a layer that waits so many milliseconds in training is
added to each of these modules: it stands for a module that takes longer than the others on a device
of its own, which this machine has not. With ``--nodes`` each run is a Slurm job on so many hosts,
in containers whose images are built once; on the testbed::

    scripts/slurm-testbed run -- scripts/as-user -- build/venv/bin/python \\
        scripts/experiments/replicas.py build/demo/chain.yaml --all --nodes 3 --folder build/runs

Usage: replicas.py definitions/chains/fashion-cdni.yaml --data build/fashion-mnist \\
           [--replicas 1,2,4] [--all] [--every 32] [--epochs 15] [--seeds 1] [--slow 20] \\
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
from compare_learning import merged

from dni_runtime import Run
from dni_runtime.run.documents.metrics import TrainLine, read_metrics

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


def trained(
    folder: Path, document: dict[str, Any], data: Path | None, nodes: int | None, images: Path
) -> tuple[float, float, float]:
    """Train a chain; return its accuracy, its samples per second, and MiB between replicas."""
    path, run = folder / "chain.yaml", folder / "run"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    given = [] if data is None else ["--data", data]

    def dnictl(*argv: str | Path) -> None:
        command = [sys.executable, "-m", "dnictl", *argv]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)

    if nodes is None:
        dnictl("up", path, "--backend", "process", "--run-dir", run, *given)
    else:
        dnictl("build", path, "--out", images, *given)
        where = ["--backend", "apptainer", "--images", images, "--run-dir", run]
        dnictl("submit", path, f"--nodes={nodes}", *where, *given)
        dnictl("wait", run)
    figures = Run.open(run).status()
    return figures.accuracy or 0.0, figures.samples_per_s or 0.0, shared_mib(run)


def shared_mib(run: Path) -> float:
    """MiB that all replicas have sent each other, by a run directory."""
    files = (run / "metrics").glob("*.jsonl")
    lines = [[one.shared_bytes or 0 for one in read_metrics(file, TrainLine)] for file in files]
    return sum(max(own, default=0) for own in lines) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("ways", nargs="*", default=WAYS, metavar="WAY")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--all", action="store_true", help="replicas of head and tail, too")
    parser.add_argument("--nodes", type=int, help="Slurm jobs of containers on so many hosts")
    parser.add_argument(
        "--with", dest="changes", default="{}", help="changes of the chain with replicas: YAML"
    )
    parser.add_argument("--folder", type=Path, help="of images and runs: all hosts must see it")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--every", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slow", type=int, default=0, metavar="MS")
    given = parser.parse_intermixed_args()
    base = yaml.safe_load(given.chain.read_text())
    if given.epochs is not None:
        base["epochs"] = given.epochs
    data = None if given.data is None else given.data.absolute()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    images = (given.folder or Path(tempfile.gettempdir())).absolute() / "images"
    if given.nodes is not None:
        base.setdefault("links", {})["interface"] = "10.77.0.0/24"  # the testbed's
        for module in base["modules"]:
            module["resources"] = {"memory": "1G"}
    print("replicas  accuracy  (lowest-highest)  samples/s      MiB  how they share", flush=True)
    for count in map(int, given.replicas.split(",")):
        for way in given.ways if count > 1 else ["-"]:
            found = []
            for seed in range(given.seeds):
                document = yaml.safe_load(yaml.safe_dump(base)) | {"seed": seed}
                for module in document["modules"][slice(None) if given.all else slice(1, -1)]:
                    module["replicas"] = count
                    if given.slow:
                        layer = {"import": "waits:Waits", "args": {"ms": given.slow}}
                        module["layers"] = [*module["layers"], layer]
                if count > 1:
                    document = merged(document, yaml.safe_load(given.changes))
                    every = {} if given.every is None else {"every": given.every}
                    document["replication"] = every | yaml.safe_load(f"{{strategy: {way}}}")
                with tempfile.TemporaryDirectory(dir=given.folder) as name:
                    folder = Path(name).absolute()
                    (folder / "waits.py").write_text(WAITS)
                    found.append(trained(folder, document, data, given.nodes, images))
            accuracies, paces, sent = zip(*found, strict=True)
            print(
                f"{count:8}  {100 * statistics.mean(accuracies):8.2f}  "
                f"({100 * min(accuracies):.2f}-{100 * max(accuracies):.2f})  "
                f"{statistics.mean(paces):13,.0f}  {statistics.mean(sent):7.1f}  {way}",
                flush=True,
            )


if __name__ == "__main__":
    main()
