#!/usr/bin/env python3
"""The feed-forward experiments of Jaderberg et al. (2016), sec. 3.1; every layer is a module.

Fully connected: hidden layers of 256 units with BatchNorm and ReLU. Convolutional: layers of 5 x 5
kernels with BatchNorm, ReLU and, after the first two, pooling; 16 channels, then 32, for two cores'
sake, and only as many training samples as --train-limit says. For each depth one
``dnictl compare``: the methods below, backpropagation in one process, and the control whose hidden
layers are not trained. Adam, batch 256, learning rate 2e-3, to zero along a cosine. What is there
already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dni_runtime.measure.compare import Trial, panels
from dni_runtime.measure.curves import draw_curves, save_figure

ROOT = Path(__file__).resolve().parents[2]
METHODS = {
    "none": "none",
    "DNI": "{synthetic: {conditioned: false, synthesizer: {mlp: {hidden: 256, depth: 2}}}}",
    "DNI-bootstrapped": (
        "{synthetic: {conditioned: false, bootstrapped: true, "
        "synthesizer: {mlp: {hidden: 256, depth: 2}}}}"
    ),
    "cDNI-linear": "{synthetic: {conditioned: true, synthesizer: linear}}",
    "cDNI": "{synthetic: {synthesizer: {mlp: {hidden: 256}}}}",
    "cDNI-bootstrapped": "{synthetic: {synthesizer: {mlp: {hidden: 256}}, bootstrapped: true}}",
    "cDNI-sparse": "{synthetic: {synthesizer: {mlp: {hidden: 256}}, learn_every: 5}}",
    "mixed": "mixed",
    "local": "local",
    "delayed": "delayed",
}
CONVOLUTIONAL = {"cDNI": "synthetic"}
"""Methods that are another one in convolutional networks."""
LABELS = {
    "backprop": "backpropagation",
    "none": "none (not trained)",
    "cDNI": "synthetic (cDNI)",
    "mixed": "mixed (default)",
}
"""What a figure calls methods, if it is something else."""
WIDTH = 256
CHANNELS = 16, 32


def convolutional(depth: int) -> list[dict[str, Any]]:
    """``depth`` convolutions, each a module; the output layer is the last one's."""
    modules: list[dict[str, Any]] = []
    channels, side = 1, 28
    for index in range(depth):
        outputs = CHANNELS[0] if index == 0 else CHANNELS[1]
        sizes = {"in_channels": channels, "out_channels": outputs, "kernel_size": 5, "padding": 2}
        layers: list[Any] = [{"Conv2d": {**sizes, "bias": False}}]
        layers += [{"BatchNorm2d": {"num_features": outputs}}, "ReLU"]
        if index < 2:
            layers.append({"MaxPool2d": {"kernel_size": 2}})
            side //= 2
        channels = outputs
        modules.append({"name": f"conv-{index + 1}", "layers": layers})
    features = channels * side * side
    modules[-1]["layers"] += ["Flatten", {"Linear": {"in_features": features, "out_features": 10}}]
    return modules


def fully_connected(depth: int) -> list[dict[str, Any]]:
    """``depth`` hidden layers, each a module; the output layer is the last one's."""
    modules: list[dict[str, Any]] = []
    for index in range(depth):
        features = {"in_features": WIDTH if index else 784, "out_features": WIDTH, "bias": False}
        layers = [{"Linear": features}, {"BatchNorm1d": {"num_features": WIDTH}}, "ReLU"]
        modules.append({"name": f"hidden-{index + 1}", "layers": layers})
    modules[-1]["layers"].append({"Linear": {"in_features": WIDTH, "out_features": 10}})
    return modules


def chain_spec(depth: int, epochs: int, window: int, data: str) -> dict[str, Any]:
    """A fully connected chain of so many hidden layers."""
    return {
        "name": f"mnist-{depth}",
        "data": {"dataset": "mnist", "path": data, "batch_size": 256, "flatten": True},
        "epochs": epochs,
        "checkpoint": {"every_epochs": 0},
        "links": {"window": window},
        "defaults": {
            "optimizer": {"Adam": {"lr": 2e-3}},
            "schedule": {"CosineAnnealingLR": {"T_max": epochs}},
        },
        "modules": fully_connected(depth),
    }


def convolutional_spec(arguments: argparse.Namespace, depth: int, data: str) -> dict[str, Any]:
    """The same with a convolutional network."""
    spec = chain_spec(depth, arguments.epochs, arguments.window, data)
    spec["name"] = f"conv-{depth}"
    spec["modules"] = convolutional(depth)
    limit = {"train_limit": arguments.train_limit} if arguments.train_limit else {}
    dataset = {"dataset": arguments.data, "path": data, "batch_size": 128}
    return {**spec, "data": {**dataset, **limit}}


def compare(arguments: argparse.Namespace, depth: int, data: str) -> dict[str, Any]:
    """The outcome of ``dnictl compare`` at one depth."""
    methods = METHODS | (CONVOLUTIONAL if arguments.network == "conv" else {})
    folder = arguments.out / f"{arguments.data}-{arguments.network}-{depth}"
    result = folder / "result.json"
    wanted = (len(arguments.methods) + 1) * arguments.seeds
    if not result.exists():
        folder.mkdir(parents=True)
        chain = folder / "chain.yaml"
        if arguments.network == "conv":
            spec = convolutional_spec(arguments, depth, data)
        else:
            spec = chain_spec(depth, arguments.epochs, arguments.window, data)
        chain.write_text(json.dumps(spec, indent=1))  # JSON is YAML
        command = [sys.executable, "-m", "dnictl", "compare", str(chain), "--interfaces", ""]
        for label in arguments.methods:
            command += ["--interface", f"{label}={methods[label]}"]
        command += ["--seeds", str(arguments.seeds), "--out", str(folder), "--threads", "1"]
        done = subprocess.run(command)
        if done.returncode != 0:
            sys.exit(done.returncode)
    document: dict[str, Any] = json.loads(result.read_text())
    if len(document["trials"]) != wanted:
        sys.exit(f"{result} holds {len(document['trials'])} of {wanted} trainings: remove {folder}")
    return document


def table(results: dict[int, dict[str, Any]]) -> str:
    """Test accuracies in per cent, mean and range, as a Markdown table."""
    lines = [
        "| layers | " + " | ".join(map(str, results)) + " |",
        "|---|" + "---|" * len(results),
    ]
    labels = [row["method"] for row in next(iter(results.values()))["rows"]]
    for label in labels:
        cells = []
        for document in results.values():
            (row,) = (row for row in document["rows"] if row["method"] == label)
            mean, low, high = (100 * row[key] for key in ("mean", "low", "high"))
            cells.append(f"{mean:.2f} ({low:.2f}-{high:.2f})")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(document: dict[str, Any], file: Path) -> None:
    """Draw the learning curves of one depth, means over seeds."""
    trials = [Trial(**one) for one in document["trials"]]
    by_epoch = panels(trials, document["metric"])[0]
    curves = {LABELS.get(label, label): points for label, points in by_epoch.curves.items()}
    title = f"{document['chain']}: means of {document['rows'][0]['trials']} trainings"
    save_figure(draw_curves(title, [by_epoch._replace(curves=curves)]), file)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=["fc", "conv"], default="fc")
    parser.add_argument("--data", choices=["mnist", "fashion-mnist"], help="(default: mnist)")
    parser.add_argument("--train-limit", type=int, help="for conv: fewer training samples")
    parser.add_argument("--layers", default="3,4,5,6", help="numbers of hidden layers")
    parser.add_argument("--methods", default=",".join(METHODS), help="of: %(default)s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--window", type=int, default=4, help="batches in flight on a link")
    parser.add_argument("--figure", type=Path, help="draw the last depth's learning curves")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "paper")
    parser.add_argument("--mnist", help="folder of the four IDX files (default: fetched)")
    arguments = parser.parse_args()
    if arguments.network == "fc" and (arguments.data == "fashion-mnist" or arguments.train_limit):
        parser.error("--data and --train-limit are for --network conv")
    arguments.data = arguments.data or "mnist"
    arguments.methods = arguments.methods.split(",")
    for label in arguments.methods:
        if label not in METHODS:
            parser.error(f"--methods: no method {label!r}; there are {', '.join(METHODS)}")
    return arguments


def folder_of(data: str, given: str | None) -> str:
    """The folder of a data set: the given one, else its own, fetched if it is missing."""
    if given is not None:
        return str(Path(given).resolve())
    python = [sys.executable] if data == "mnist" else []
    command = [*python, str(ROOT / "scripts" / f"fetch-{data}"), str(ROOT / "build" / data)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def main() -> None:
    """Train what is missing, and print the table."""
    arguments = parse()
    data = folder_of(arguments.data, arguments.mnist)
    depths = [int(depth) for depth in arguments.layers.split(",")]
    results = {depth: compare(arguments, depth, data) for depth in depths}
    print(table(results))
    if arguments.figure is not None:
        draw(results[depths[-1]], arguments.figure)


if __name__ == "__main__":
    main()
