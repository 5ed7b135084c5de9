#!/usr/bin/env python3
"""Compare synthesizers on one chain, in one process: accuracy, cosine with the true gradient, cost.

Usage: scripts/compare_synthesizers.py CHAIN [--epochs N] [--delay BATCHES] [--seeds N] [METHOD ...]

Chains to compare them on are in scripts/chains; their data is what scripts/fetch-mnist and
scripts/fetch-fashion-mnist put into build/mnist and build/fashion-mnist.

A method is a synthesizer's name, or a gradient interface as chain.yaml has it: local, none,
'{local: {pool: 2}}', '{synthetic: {synthesizer: {critic: {grid: 4}}}}'. Times are CPU times over
that of backpropagation, medians of stretches in turns; products are multiplications of one signal
and one lesson at each cut, over those of the module's own forward and backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.resolve import worker_specs
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.synthesizers import SYNTHESIZERS
from dni_runtime.data import describe, open_data
from dni_runtime.spec import ChainSpec, Choice, load_chain
from dni_runtime.spec.load import parse_choice
from dni_runtime.worker.memory import keep_freed_memory

STRETCH, STRETCHES = 8, 11
"""Batches that are timed at once, and how often."""


class Trained(NamedTuple):
    """How one training ended.

    Attributes:
        accuracy: Of the chain, in per cent.
        cosines: Means of the last epoch, at each cut that has a synthesizer.
        products: Of the interface at each cut, over its module's.
    """

    accuracy: float
    cosines: list[float]
    products: list[float]


def train(chain: ChainSpec, base: Path, delay: int) -> Trained:
    """Train one chain."""
    workers = worker_specs(chain, describe(chain.data, base))
    source = open_data(chain.data, base, seed=chain.seed)
    local = LocalChain(workers, delay=delay)
    cosines: list[list[float]] = [[] for _ in local.steps[:-1]]
    for epoch in range(1, chain.epochs + 1):
        for x_BX, y_BY in source.train_batches(epoch):
            local.train_batch(x_BX, y_BY)
            if epoch == chain.epochs:
                for step, values in zip(local.steps, cosines, strict=False):
                    cosine = step.counters.cosine.take()
                    if cosine is not None:
                        values.append(cosine)
                    step.measure_late = True
        local.end_epoch()
    result = evaluate(local.predict, source.eval_batches(), workers[-1])
    means = [statistics.fmean(v[1:]) for v in cosines if v[1:]]
    shares = products(local.steps, *next(iter(source.train_batches(1))))
    return Trained(100 * result["accuracy"], means, shares)


def products(steps: Sequence[ModuleStep], x_BX: Tensor, y_BY: Tensor) -> list[float]:
    """What each gradient interface multiplies for a batch, over what its module does."""
    shares = []
    for index, step in enumerate(steps[:-1]):
        assert step.interface is not None
        step.layers.requires_grad_(True)  # as if it were trained, where nothing is
        with FlopCounterMode(display=False) as module:
            h_BH = step.layers(x_BX.requires_grad_(index > 0))
            h_BH.backward(torch.ones_like(h_BH))
        x_BX = h_BH.detach()
        with FlopCounterMode(display=False) as interface:
            if step.interface.signals:
                step.interface.signal(x_BX, y_BY)
                step.interface.learn(x_BX, y_BY, torch.randn_like(x_BX), measure=False)
        shares.append(interface.get_total_flops() / max(module.get_total_flops(), 1))
    return shares


def backprop(chain: ChainSpec, base: Path) -> float:
    """Train by backpropagation; gives the accuracy in per cent."""
    workers = worker_specs(chain, describe(chain.data, base))
    source = open_data(chain.data, base, seed=chain.seed)
    reference = Backprop(workers)
    for epoch in range(1, chain.epochs + 1):
        for x_BX, y_BY in source.train_batches(epoch):
            reference.train_batch(x_BX, y_BY)
        reference.end_epoch()
    return 100 * evaluate(reference.predict, source.eval_batches(), workers[-1])["accuracy"]


def time_over_backprop(chain: ChainSpec, base: Path, delay: int) -> float:
    """CPU time of a chain over backpropagation's, by turns, so that both meet the same machine."""
    workers = worker_specs(chain, describe(chain.data, base))
    source = open_data(chain.data, base, seed=chain.seed)
    trainers = [LocalChain(workers, delay=delay), Backprop(workers)]
    batches, ratios = islice(source.train_batches(1), STRETCHES * STRETCH), []
    while stretch := list(islice(batches, STRETCH)):
        taken = []
        for trainer in trainers:
            began = time.process_time()
            for x_BX, y_BY in stretch:
                trainer.train_batch(x_BX, y_BY)
            taken.append(time.process_time() - began)
        ratios.append(taken[0] / taken[1])
    return statistics.median(ratios)


def with_interface(chain: ChainSpec, method: str) -> ChainSpec:
    """The chain with one gradient interface at each cut."""
    if method in SYNTHESIZERS:
        interface = Choice(name="synthetic", args={"synthesizer": method})
    else:
        interface = parse_choice(method)
    modules = [m.model_copy(update={"interface": interface}) for m in chain.modules[:-1]]
    return chain.model_copy(update={"modules": (*modules, chain.modules[-1])})


def main() -> None:
    """Print one line per method, backpropagation first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chain", type=Path)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all but conv")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--delay", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    chain, base = load_chain(given.chain), given.chain.parent
    sys.path.insert(0, str(base))  # where the chain's import paths start
    if given.epochs:
        chain = chain.model_copy(update={"epochs": given.epochs})
    chains = [chain.model_copy(update={"seed": seed}) for seed in range(given.seeds)]
    print(line("backprop", [backprop(chain, base) for chain in chains]), "time 1.00", flush=True)
    for method in given.methods or [name for name in SYNTHESIZERS if name != "conv"]:
        trained = [train(with_interface(chain, method), base, given.delay) for chain in chains]
        times = time_over_backprop(with_interface(chain, method), base, given.delay)
        cosines = zip(*(one.cosines for one in trained), strict=True)
        means = " ".join(f"{statistics.fmean(cut):.3f}" for cut in cosines)
        shares = " ".join(f"{share:.1%}" for share in trained[0].products)
        print(
            line(method, [one.accuracy for one in trained]),
            f"time {times:4.2f}  products {shares}  cosines {means}",
            flush=True,
        )


def line(method: str, accuracies: Sequence[float]) -> str:
    mean, low, high = statistics.fmean(accuracies), min(accuracies), max(accuracies)
    return f"{method:<12} {mean:6.2f} ({low:.2f}-{high:.2f}) % "


if __name__ == "__main__":
    main()
