#!/usr/bin/env python3
"""Is the promise of early exits kept on images that no choice has seen, and how many leave?

Trains two chains of four modules in one process, on CIFAR-10's training images and on
Fashion-MNIST, with ``mixed`` and ``local`` gradients. Half of the validation samples choose the
thresholds, the other half checks them, as ``dnictl exits`` does it; the test images judge both.
What the exits answered is kept in a file, so that what is there is not trained again.

Usage: exits.py [--seeds 3] [--chains cifar-exits fashion-exits] [--points 0.5]
"""

from __future__ import annotations

import argparse
import sys
import time
from math import prod
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from dni_runtime.core.chain import LocalChain, activations
from dni_runtime.core.exits import Answers, assess, choose
from dni_runtime.data import DataSource, describe, open_data
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import ChainSpec, Choice, parse_chain

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "build" / "exits"
DELAY = 1  # batches by which gradients come late at each cut


class Scores(NamedTuple):
    """The scores of all exits on the samples of a split, and the labels."""

    p_ENC: Tensor
    y_N: Tensor

    def answers(self, *, averaged: bool = False) -> Answers:
        """What the exits answer; or the mean of the probabilities of those met so far."""
        p_ENC = self.p_ENC.softmax(2)
        if averaged:
            p_ENC = p_ENC.cumsum(0) / torch.arange(1, len(p_ENC) + 1).view(-1, 1, 1)
            p_ENC[-1] = self.p_ENC[-1].softmax(1)  # what the promise is compared with
        confidence_EN, class_EN = p_ENC.max(2)
        return Answers(confidence_EN, class_EN == self.y_N)


def chain_of(name: str, interface: str, seed: int) -> ChainSpec:
    """A chain with a gradient interface."""
    chain = parse_chain((HERE / "chains" / f"{name}.yaml").read_text())
    defaults = chain.defaults.model_copy(update={"interface": Choice(name=interface)})
    return chain.model_copy(update={"defaults": defaults, "seed": seed})


@torch.no_grad()
def scores(local: LocalChain, source: DataSource, split: str) -> Scores:
    """What the exits answer on a split."""
    rows, labels = [], []
    for x, y_B in source.batches(split, 0, 0):
        outputs = zip(local.steps, activations(local.steps, x), strict=True)
        rows.append(torch.stack([p for step, h in outputs if (p := step.predict(h)) is not None]))
        labels.append(y_B)
    return Scores(torch.cat(rows, 1), torch.cat(labels))


def train(name: str, interface: str, seed: int) -> dict[str, Scores]:
    """The scores on the validation and the test samples, of a trained chain."""
    file = OUT / f"{name}-{interface}-{seed}.pt"
    if not file.exists():
        began = time.monotonic()
        chain = chain_of(name, interface, seed)
        workers = worker_specs(chain, describe(chain.data, HERE / "chains"))
        source = open_data(chain.data, HERE / "chains", seed=seed)
        local = LocalChain(workers, delay=DELAY)
        for epoch in range(1, chain.epochs + 1):
            for x, y_B in source.train_batches(epoch):
                local.train_batch(x, y_B)
            local.end_epoch()
            print(f"{file.stem} {epoch} {time.monotonic() - began:.0f} s", file=sys.stderr)
        found = {split: tuple(scores(local, source, split)) for split in ("eval", "test")}
        OUT.mkdir(parents=True, exist_ok=True)
        torch.save(found, file)
    return {split: Scores(*pair) for split, pair in torch.load(file).items()}


def line(name: str, interface: str, runs: list[dict[str, Scores]], points: float) -> str:
    """A row of the table: of each seed, or means over the seeds."""
    tested, checked, averaged, accuracies = [], [], [], []
    for run in runs:
        test = run["test"].answers()
        choosing, checking = run["eval"].answers().halves()
        thresholds = choose(choosing, points)
        checked.append(assess(checking, thresholds, points))
        tested.append(assess(test, thresholds, points))
        accuracies.append(100 * test.right_EN.double().mean(1))
        thresholds = choose(run["eval"].answers(averaged=True).halves()[0], points)
        averaged.append(assess(run["test"].answers(averaged=True), thresholds, points))
    chain = chain_of(name, interface, 0)
    first = worker_specs(chain, describe(chain.data, HERE / "chains"))[0]
    stay = 1 - fmean(rule.leave[0] for rule in tested)
    times = prod(first.inputs[0].shape) / (stay * prod(first.output.shape))
    early = [f"{100 * fmean(share):.0f}" for share in zip(*(r.leave for r in tested), strict=True)]
    cells = (
        f"{name}, `{interface}`",
        " / ".join(f"{value:.1f}" for value in torch.stack(accuracies).mean(0).tolist()),
        " / ".join(early),
        ", ".join(rule.verdict for rule in checked),
        ", ".join(f"{rule.lost[1]:+.2f}" for rule in tested),
        f"{times:.1f}",
        f"{100 * fmean(1 - rule.leave[-1] for rule in averaged):.0f} %, "
        f"{fmean(rule.lost[1] for rule in averaged):+.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chains", nargs="+", default=["cifar-exits", "fashion-exits"])
    parser.add_argument("--interfaces", nargs="+", default=["mixed", "local"])
    parser.add_argument("--points", type=float, default=0.5)
    arguments = parser.parse_args()
    print(
        "| chain | accuracy of each exit, % | leave there, % | on the checking half the promise | "
        "points lost on test images | times fewer bytes than raw images | averaged: leave, lost |"
        "\n|---|---|---|---|---|---|---|"
    )
    for name in arguments.chains:
        for interface in arguments.interfaces:
            runs = [train(name, interface, seed) for seed in range(arguments.seeds)]
            print(line(name, interface, runs, arguments.points), flush=True)


if __name__ == "__main__":
    main()
