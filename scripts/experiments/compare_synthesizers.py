#!/usr/bin/env python3
"""What gradient interfaces cost on one chain, and how well they predict true gradients.

Usage: compare_synthesizers.py CHAIN [--epochs N] [--delay BATCHES] [METHOD ...]

How well a chain learns by them is compared by compare_learning.py. Chains are in the folder chains;
their data is what scripts/fetch-mnist and scripts/fetch-fashion-mnist put into build/.

A method is a synthesizer's name, or a gradient interface as chain.yaml has it: local,
'{local: {head: mlp-sr}}', '{synthetic: {synthesizer: {critic: {grid: 4}}}}'. For each cut there
are two columns: multiplications of one signal and one lesson over those of the module's own forward
and backward pass, and the cosine between predicted and true gradients in the last epoch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.synthesizers import SYNTHESIZERS
from dni_runtime.data import describe, open_data
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import ChainSpec, Choice, load_chain
from dni_runtime.spec.load import parse_choice


def train(chain: ChainSpec, base: Path, delay: int) -> tuple[list[float], list[float]]:
    """Train one chain; gives products and cosines at each cut.

    Cosines are means of the last epoch; they are NaN if nothing is predicted.
    """
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
                        values.append(float(cosine))
                    step.measure_late = True
        local.end_epoch()
    means = [statistics.fmean(values[1:] or [float("nan")]) for values in cosines]
    return products(local.steps, *next(iter(source.train_batches(1)))), means


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
            if step.interface.timing.signals:
                step.interface.signal(x_BX, y_BY)
                step.interface.learn(x_BX, y_BY, torch.randn_like(x_BX), measure=False)
        shares.append(interface.get_total_flops() / max(module.get_total_flops(), 1))
    return shares


def with_interface(chain: ChainSpec, method: str) -> ChainSpec:
    """The chain with one gradient interface at each cut."""
    if method in SYNTHESIZERS:
        interface = Choice(name="synthetic", args={"synthesizer": method})
    else:
        interface = parse_choice(method)
    modules = [m.model_copy(update={"interface": interface}) for m in chain.modules[:-1]]
    return chain.model_copy(update={"modules": (*modules, chain.modules[-1])})


def main() -> None:
    """Print a table with a row for each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chain", type=Path)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all but conv")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--delay", type=int, default=4, help="batches at each link")
    given = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    chain, base = load_chain(given.chain), given.chain.parent
    sys.path.insert(0, str(base))  # where the chain's import paths start
    if given.epochs:
        chain = chain.model_copy(update={"epochs": given.epochs})
    print("| method | products | cosines |\n|---|---|---|")
    for method in given.methods or [name for name in SYNTHESIZERS if name != "conv"]:
        shares, cosines = train(with_interface(chain, method), base, given.delay)
        told = ", ".join(f"{cosine:.2f}" for cosine in cosines)
        cells = [method, ", ".join(f"{share:.1%}" for share in shares), told]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
