#!/usr/bin/env python3
"""How good the cuts are that ``dnictl split`` finds, for networks that others wrote.

For each network, in 2, 3 and 4 modules: the slowest module beside the mean, beside the best of all
cuts (every one is tried, with the same measured times), and beside cuts into equal numbers of the
pieces between possible cuts. ``--throughput`` trains chains of two modules, cut in both ways, with
real workers, in turns. It needs torchvision, timm and transformers.

Usage: split_balance.py [--modules 2 3 4] [--throughput] [--repetitions 3] [NETWORK ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

from peers.pace import ENDLESS, measure_pace
from peers.processes import Timing
from zoo import SOURCES, settings_of

from dni_runtime.data import describe
from dni_runtime.plan.prepare import importing_from, prepare
from dni_runtime.plan.splitting import split_chain
from dni_runtime.spec import Choice, DataSpec
from dni_runtime.split.network import network_of, planning
from dni_runtime.split.plan import Plan, SplitRequest

SAMPLES = 32
NETWORKS = ("resnet18", "resnet50", "vit", "u-net", "gpt2", "bert")


def slowest(plan: Plan, ends: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of the slowest module, and of all on average."""
    spans = pairwise([0, *ends, len(plan.costs.segments)])
    seconds = [plan.seconds(number, i, j) for number, (i, j) in enumerate(spans)]
    return max(seconds), statistics.mean(seconds)


def look(name: str, modules: Sequence[int]) -> tuple[list[str], list[str]]:
    """Print a row for each number of modules; return both cuts into two."""
    settings, given = settings_of(name, batch_size=SAMPLES, count=256)
    base = SOURCES.parent
    with importing_from(base):
        info = describe(DataSpec.model_validate(settings["data"]), base)
        spec, network = network_of("networks.zoo:build", info, **given)
        loss = Choice(name=settings["loss"])
        with planning(spec, network, info, SplitRequest(batch_size=SAMPLES, loss=loss)) as plan:
            count = len(plan.costs.segments)
            for number in modules:
                plan.request = SplitRequest(modules=number, batch_size=SAMPLES, loss=loss)
                found = plan.best()
                even = [round(count * k / number) for k in range(1, number)]
                best = min(
                    slowest(plan, ends)[0] for ends in combinations(range(1, count), number - 1)
                )
                ours, mean = slowest(plan, found)
                print(
                    f"| {name} | {count} | {number} | {ours / mean:.2f} | {ours / best:.3f} | "
                    f"{slowest(plan, even)[0] / ours:.2f} |",
                    flush=True,
                )
            plan.request = SplitRequest(modules=2, batch_size=SAMPLES, loss=loss)
            places = [plan.best(), [round(count / 2)]]
            ends = [plan.costs.segments[end - 1].end for (end,) in places]
    return tuple([end.name] for end in ends if end is not None)  # type: ignore[return-value]


def pace(name: str, at: Sequence[str], folder: Path) -> float:
    """Return the samples per second of a chain of two modules."""
    settings, given = settings_of(name, batch_size=SAMPLES, count=256)
    path = folder / "chain.yaml"
    split_chain("networks.zoo:build", path, settings | ENDLESS, at=at, force=True, **given)
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    return measure_pace(run, prepare(path), Timing(3.0, 8.0), {})[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=[])
    parser.add_argument("--modules", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    cuts = {}
    print("| network | pieces | modules | slowest / mean | slowest / best of all | even / found |")
    print("|---|---|---|---|---|---|")
    for name in given.networks or NETWORKS:
        cuts[name] = look(name, given.modules)
    if given.throughput:
        print("\n| network | found, samples/s | even, samples/s | ratio |\n|---|---|---|---|")
    for name, both in cuts.items() if given.throughput else ():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "networks").symlink_to(SOURCES.absolute())
            turns = [
                [pace(name, at, Path(folder)) for at in both] for _ in range(given.repetitions)
            ]
        found, even = (statistics.median(one) for one in zip(*turns, strict=True))
        ratio = statistics.median(one / other for one, other in turns)
        print(f"| {name} | {found:,.1f} | {even:,.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
