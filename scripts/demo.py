"""The demo: a chain of four Apptainer containers on Fashion-MNIST, beside plain backpropagation.

Builds the images (the base image once), trains the chain with ``dnictl up``, trains the same
network by plain backpropagation in this process, and draws both learning curves.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import torch

from dni_runtime import load
from dni_runtime.core.chain import Backprop
from dni_runtime.core.evaluation import evaluate
from dni_runtime.data import describe, open_data
from dni_runtime.measure.curves import Panel, draw_curves
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.documents.metrics import EvaluationLine, read_metrics
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, load_chain

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "demo"
LEAST_ACCURACY = 86.0
MOST_POINTS_BELOW = {15: 1.0, 6: 2.0}
"""What is expected, by the number of epochs; of another number any accuracy will do."""
MILESTONES = 0.6, 0.8
"""When the learning rate falls, as parts of all epochs; so it does in the packaged example."""


def say(text: str) -> None:
    """Tell what happens, on stderr."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


def dnictl(*arguments: str | Path) -> str:
    """Run dnictl; gives what it printed on stdout. If it fails, so does the demo."""
    command = [sys.executable, "-m", "dnictl", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=OUT)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


def write_chain(epochs: int | None) -> Path:
    """The packaged example with this machine's data and torch filled in."""
    data = subprocess.run(
        [ROOT / "scripts" / "fetch-fashion-mnist", ROOT / "build" / "fashion-mnist"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()[-1]
    text = (files("dni_runtime.definitions") / "chains" / "fashion-cdni.yaml").read_text()
    text = text.replace("  flatten: true\n", f"  flatten: true\n  path: {json.dumps(data)}\n")
    if epochs is not None:
        text = re.sub("^epochs: .*", f"epochs: {epochs}", text, count=1, flags=re.MULTILINE)
        milestones = [round(epochs * part) for part in MILESTONES]
        text = re.sub("milestones: .*?]", f"milestones: {milestones}", text, count=1)
    if index := Path(sys.prefix, "torch-index").read_text().strip():
        text += f"\nimage: {json.dumps({'torch_index': index})}\n"
    path = OUT / "chain.yaml"
    path.write_text(text)
    return path


def train_backprop(chain: ChainSpec) -> list[float]:
    """Train the same network by plain backpropagation; gives its accuracy after each epoch."""
    workers = worker_specs(chain, describe(chain.data, OUT))
    source = open_data(chain.data, OUT, seed=chain.seed)
    reference = Backprop(workers)
    curve = []
    for epoch in range(1, chain.epochs + 1):
        for x_BX, y_BY in source.train_batches(epoch):
            reference.train_batch(x_BX, y_BY)
        reference.end_epoch()
        result = evaluate(reference.predict, source.eval_batches(), workers[-1])
        curve.append(100 * result["accuracy"])
    return curve


def main() -> None:
    """Run the demo; exit status 1 when the chain has not learned as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--epochs", type=int, help="train for so many: 15, 6 (as CI does), or any other number"
    )
    epochs = parser.parse_args().epochs
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    path = write_chain(epochs)
    chain = load_chain(path)
    say("images (the base image takes some minutes, once)")
    dnictl("build", path, "--out", OUT / "images")
    built = time.monotonic()
    say("training the chain in four containers")
    runs = OUT / "runs"
    dnictl("up", path, "--backend", "apptainer", "--images", OUT / "images", "--runs", runs)
    run = RunDir(Path(json.loads(dnictl("status", "--runs", runs, "--json"))["path"]))
    tail = chain.modules[-1].name
    lines = read_metrics(run.metrics(tail), EvaluationLine)
    curve = [100 * (line.accuracy or 0.0) for line in lines if line.kind == "eval"]
    trained = time.monotonic()
    say("training the same network by plain backpropagation")
    torch.set_num_threads(1)
    backprop = train_backprop(chain)

    model = OUT / "model.safetensors"
    dnictl("export", run.root, "-o", model, "--force")
    source = open_data(chain.data, OUT, seed=chain.seed)
    workers = worker_specs(chain, describe(chain.data, OUT))
    exported = 100 * evaluate(load(model), source.eval_batches(), workers[-1])["accuracy"]
    curves = {"one process, backprop": backprop, "four containers, cDNI": curve}
    points = {label: list(enumerate(one, 1)) for label, one in curves.items()}
    picture = draw_curves(
        "Fashion-MNIST, 4-module MLP", [Panel("epoch", "test accuracy (%)", points)]
    )
    picture.savefig(OUT / "curves.png", dpi=120)
    gap = backprop[-1] - curve[-1]
    rows = [
        ("four Apptainer containers, cDNI", curve[-1]),
        ("  the exported model, loaded again", exported),
        ("one process, plain backpropagation", backprop[-1]),
    ]
    print(f"\nFashion-MNIST test accuracy after {chain.epochs} epochs")
    for name, accuracy in rows:
        print(f"  {name:<36} {accuracy:6.2f} %")
    print(f"  {'difference':<36} {-gap:+6.2f} points")
    print(f"learning curves: {OUT / 'curves.png'}")
    print(f"run directory:   {run.root}")
    print(
        f"images {built - began:.0f} s, chain {trained - built:.0f} s, "
        f"all {time.monotonic() - began:.0f} s"
    )
    (OUT / "result.json").write_text(
        json.dumps({"chain": curve, "backprop": backprop, "exported": exported}) + "\n"
    )
    most = MOST_POINTS_BELOW.get(chain.epochs)
    learned = most is None or (gap <= most and curve[-1] >= LEAST_ACCURACY)
    if not learned or abs(exported - curve[-1]) > 0.01:
        sys.exit("demo: the chain did not learn as it should")


if __name__ == "__main__":
    main()
