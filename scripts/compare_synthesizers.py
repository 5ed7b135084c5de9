"""Compare synthesizers on one chain, in one process: accuracy, cosine with the true gradient, cost.

Usage: scripts/compare_synthesizers.py CHAIN [--epochs N] [--delay BATCHES] [NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.resolve import worker_specs
from dni_runtime.core.synthesizers import SYNTHESIZERS
from dni_runtime.data import describe, open_data
from dni_runtime.spec import ChainSpec, Choice, load_chain


def train(chain: ChainSpec, base: Path, delay: int) -> tuple[float, list[float], float]:
    """Train one chain; gives accuracy (%), the boundaries' last mean cosines, and seconds."""
    workers = worker_specs(chain, describe(chain.data, base))
    source = open_data(chain.data, base, seed=chain.seed)
    local = LocalChain(workers, delay=delay)
    cosines: list[list[float]] = [[] for _ in local.steps[:-1]]
    began = time.perf_counter()
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
    took = time.perf_counter() - began
    result = evaluate(local.predict, source.eval_batches(), workers[-1])
    return 100 * result["accuracy"], [statistics.fmean(v[1:]) for v in cosines if v[1:]], took


def main() -> None:
    """Print one line per synthesizer, backpropagation first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chain", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all but conv")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--delay", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chain, base = load_chain(given.chain), given.chain.parent
    if given.epochs:
        chain = chain.model_copy(update={"epochs": given.epochs})
    workers = worker_specs(chain, describe(chain.data, base))
    source = open_data(chain.data, base, seed=chain.seed)
    reference = Backprop(workers)
    began = time.perf_counter()
    for epoch in range(1, chain.epochs + 1):
        for x_BX, y_BY in source.train_batches(epoch):
            reference.train_batch(x_BX, y_BY)
        reference.end_epoch()
    plain = time.perf_counter() - began
    accuracy = 100 * evaluate(reference.predict, source.eval_batches(), workers[-1])["accuracy"]
    print(f"{'backprop':<12} {accuracy:6.2f} %  time 1.00")
    for name in given.names or [name for name in SYNTHESIZERS if name != "conv"]:
        interface = Choice(name="synthetic", args={"synthesizer": name})
        modules = [m.model_copy(update={"interface": interface}) for m in chain.modules[:-1]]
        changed = chain.model_copy(update={"modules": (*modules, chain.modules[-1])})
        accuracy, cosines, took = train(changed, base, given.delay)
        shown = " ".join(f"{cosine:.3f}" for cosine in cosines)
        print(
            f"{name:<12} {accuracy:6.2f} %  time {took / plain:4.2f}  cosines {shown}", flush=True
        )


if __name__ == "__main__":
    main()
