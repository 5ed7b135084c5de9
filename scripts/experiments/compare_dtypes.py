#!/usr/bin/env python3
"""What narrow types on the wire cost in accuracy: MNIST, four hidden layers, each a module.

One process, without sockets: whatever crosses a cut goes through the link's own encoding, and true
gradients come a fixed number of batches late. So a seed gives the same figures each time. The
chain is that of ``reproduce_paper.py``. Evaluation goes through the cuts, too, as in a run. What is
there already is not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from typing import Any, get_args

import torch
from remember import accuracies, cell, grid, parser
from reproduce_paper import ROOT, chain_spec, folder_of
from torch import Tensor

from dni_runtime.core.chain import Carry, LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.data import DataSource, open_data
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.tensors import from_buffers, to_buffers
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import ChainSpec, DataInfo, Dtype, TensorSpec, WorkerSpec, parse_chain
from dni_runtime.wire import TensorContract, nbytes

PLAIN = "float32"
MNIST = DataInfo(
    sample=TensorSpec(shape=(784,), dtype="float32"),
    label=TensorSpec(shape=(), dtype="int64"),
    classes=10,
)
SIDES = {"activations": (1, 0), "gradients": (0, 1), "both": (1, 1)}


def carry(contracts: list[TensorContract]) -> Carry:
    """Send a tensor through the wire's encoding."""

    def through(cut: int, tensor: Tensor) -> Tensor:
        return from_buffers(*to_buffers(tensor, contracts[cut]), "float32")

    return through


def contracts(workers: tuple[WorkerSpec, ...]) -> tuple[list[TensorContract], list[TensorContract]]:
    """What travels down and up at each cut."""
    cuts = [LinkContract.of(worker, worker.targets[0]) for worker in workers[:-1]]
    return [cut.activation for cut in cuts], [cut.gradient or cut.activation for cut in cuts]


def chain_of(
    arguments: argparse.Namespace, interface: str, down: str, up: str, seed: int
) -> ChainSpec:
    """The chain, with its gradient interface and types on the wire."""
    spec = chain_spec(arguments.layers, arguments.epochs, arguments.delay, arguments.mnist)
    spec["seed"] = seed
    spec["defaults"]["interface"] = interface
    spec["links"] |= {"dtype": down, "gradient_dtype": up}
    return parse_chain(json.dumps(spec))  # JSON is YAML


def fit(local: LocalChain, chain: ChainSpec, source: DataSource) -> None:
    """Train for the chain's epochs."""
    for epoch in range(1, chain.epochs + 1):
        for x_BX, y_BY in source.train_batches(epoch):
            local.train_batch(x_BX, y_BY)
        local.end_epoch()


def train(arguments: argparse.Namespace, one: dict[str, Any]) -> float:
    """The test accuracy of one training, in per cent."""
    chain = chain_of(arguments, one["interface"], one["down"], one["up"], one["seed"])
    workers = worker_specs(chain, MNIST)
    activations, gradients = contracts(workers)
    local = LocalChain(workers, delay=arguments.delay, down=carry(activations), up=carry(gradients))
    source = open_data(chain.data, ROOT, seed=chain.seed)
    fit(local, chain, source)
    return 100 * evaluate(local.predict, source.eval_batches(), workers[-1])["accuracy"]


def errors(arguments: argparse.Namespace) -> str:
    """What arrives of activations and gradients, as a Markdown table.

    The chains are trained with float32 on the wire; every fiftieth tensor is sent as each type.
    Per type: the norm of the error over that of the tensor, and the share of elements that arrive
    as zero without being it.
    """
    cells = defaultdict(list)
    for interface in arguments.interfaces:
        chain = chain_of(arguments, interface, PLAIN, PLAIN, 0)
        sides: dict[str, Carry] = {}
        for side in (0, 1):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.dtypes}
            sides["up" if side else "down"] = watch(arguments, interface, side, found)
            for dtype, values in found.items():
                cells[dtype].append(values)
        fit(
            LocalChain(worker_specs(chain, MNIST), delay=arguments.delay, **sides),
            chain,
            open_data(chain.data, ROOT, seed=0),
        )
    heads = [f"{i}, {side}" for i in arguments.interfaces for side in ("activations", "gradients")]
    lines = [f"| on the wire | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for dtype, columns in cells.items():
        means = [[100 * statistics.fmean(part) for part in zip(*c, strict=True)] for c in columns]
        shown = [f"{error:.2f} % ({zeroed:.0f} %)" for error, zeroed in means]
        lines.append(f"| {dtype} | {' | '.join(shown)} |")
    return "\n".join(lines)


def watch(
    arguments: argparse.Namespace,
    interface: str,
    side: int,
    found: dict[str, list[tuple[float, float]]],
) -> Carry:
    """Let tensors pass, and note what narrow types would do to some of them."""
    carries = {
        dtype: carry(
            contracts(worker_specs(chain_of(arguments, interface, dtype, dtype, 0), MNIST))[side]
        )
        for dtype in found
    }
    calls = itertools.count()

    def through(cut: int, tensor: Tensor) -> Tensor:
        if next(calls) % 50 == 0:
            for dtype, values in found.items():
                back = carries[dtype](cut, tensor)
                error = (back - tensor).norm() / tensor.norm()
                zeroed = ((back == 0) & (tensor != 0)).float().mean()
                values.append((float(error), float(zeroed)))
        return tensor

    return through


def bytes_per_batch(dtype: str) -> int:
    """Bytes of one batch's activations (or gradients) at a cut, with their scales."""
    spec = chain_spec(2, 1, 1, "")
    spec["links"] |= {"dtype": dtype}
    chain = parse_chain(json.dumps(spec))
    (contract, *_), _ = contracts(worker_specs(chain, MNIST))
    _, buffers = to_buffers(torch.zeros(chain.data.batch_size, *contract.shape), contract)
    return sum(map(nbytes, buffers))


def table(results: list[dict[str, Any]], interfaces: list[str], dtypes: list[str]) -> str:
    """Test accuracies in per cent, mean and range, as a Markdown table."""
    accuracies_of = defaultdict(list)
    for result in results:
        accuracies_of[result["interface"], result["down"], result["up"]].append(result["accuracy"])

    heads = [f"{interface}, {side}" for interface in interfaces for side in SIDES]
    lines = [
        f"| on the wire | bytes per batch | {' | '.join(heads)} |",
        f"|---|---|{'---|' * len(heads)}",
    ]
    for dtype in [PLAIN, *dtypes]:
        cells = [
            cell(accuracies_of[interface, dtype if down else PLAIN, dtype if up else PLAIN])
            for interface in interfaces
            for down, up in SIDES.values()
        ]
        lines.append(f"| {dtype} | {bytes_per_batch(dtype):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    options = parser(__doc__, ROOT / "build" / "dtypes.jsonl")
    known = [dtype for dtype in get_args(Dtype) if dtype != PLAIN]
    options.add_argument("--interfaces", default="mixed,delayed")
    options.add_argument("--dtypes", default=",".join(known), help="of: %(default)s")
    options.add_argument("--delay", type=int, default=4, help="batches that gradients are late")
    options.add_argument("--errors", action="store_true", help="only how much narrow types change")
    arguments = options.parse_args()
    arguments.interfaces = arguments.interfaces.split(",")
    arguments.dtypes = arguments.dtypes.split(",")
    for dtype in arguments.dtypes:
        if dtype not in known:
            options.error(f"--dtypes: no type {dtype!r}; there are {', '.join(known)}")
    return arguments


def main() -> None:
    """Train what is missing, and print the table."""
    arguments = parse()
    torch.set_num_threads(1)
    arguments.mnist = folder_of("mnist", arguments.mnist)
    if arguments.errors:
        print(errors(arguments))
        return
    ways = [(PLAIN, PLAIN)]
    for dtype in arguments.dtypes:
        ways += [(dtype if down else PLAIN, dtype if up else PLAIN) for down, up in SIDES.values()]
    wanted = [
        {**one, "down": down, "up": up}
        for one in grid(arguments, delay=[arguments.delay], interface=arguments.interfaces)
        for down, up in ways
    ]
    results = accuracies(arguments.results, wanted, lambda one: train(arguments, one))
    print(table(results, arguments.interfaces, arguments.dtypes))


if __name__ == "__main__":
    main()
