#!/usr/bin/env python3
"""Compare how well a chain learns by several gradient interfaces, in one process.

Usage: compare_learning.py CHAIN METHOD ... [--sweep 3e-4,1e-3,3e-3] [--seeds 3] [--delay 4]

A method is an interface's name, LABEL=INTERFACE as chain.yaml has it, or LABEL=MAPPING of settings
of modules: 'late={interface: delayed, optimizer: {NAdam: {lr: 1e-3}}}'. Beside them stand
backpropagation, the control "none", in which all modules but the last keep their initial weights,
and, if it is named, "heads": backpropagation of the sum of the chain's loss and half of that of a
head behind each module, as `local` and `mixed` have it.

Each method, and each delay, has the learning rate of the sweep that is best on the chain's
validation part (data.validation) with the first seed; with it, and each seed, it is trained, and
the test set evaluated at the end. Means and standard deviations are over seeds. "Gap closed" is the
test figure's way from the control to backpropagation. Time is CPU time over that of
backpropagation, the median of stretches in turns. Trainings whose results are in the file of
results are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from remember import measured
from torch import Tensor

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.forward import Inputs
from dni_runtime.core.interfaces.base import Boundary
from dni_runtime.core.interfaces.local import Local, LocalOptions
from dni_runtime.core.interfaces.mixed import MixedOptions
from dni_runtime.core.metrics import rises
from dni_runtime.data import describe, open_data
from dni_runtime.errors import DniError, UsageError
from dni_runtime.resolve.resolve import resolved_chain, worker_specs
from dni_runtime.spec import ChainSpec, Choice, DataInfo, ModuleSpec, WorkerSpec, parse_chain
from dni_runtime.spec.load import parse_yaml
from dni_runtime.spec.model import ModuleDefaults
from dni_runtime.wire import Part
from dni_runtime.worker.memory import keep_freed_memory

ROOT = Path(__file__).resolve().parents[2]
BACKPROP, CONTROL, HEADS = "backprop", "none", "heads"
STRETCH, STRETCHES = 6, 9
"""Batches that are timed at once, and how often."""

Delay = int | list[int]
"""Batches that a gradient takes up each link, or those of each link, from the head down."""

Training = dict[str, Any]
"""What tells one training from another: chain, method, digest of the spec, rate, delay, seed."""


class BackpropWithHeads(Backprop):
    """Deep supervision (Lee et al. 2015, arXiv:1409.5185): what heads give without decoupling."""

    def __init__(self, workers: Sequence[WorkerSpec], device: torch.device | str = "cpu") -> None:
        super().__init__(workers, device)
        boundaries = map(Boundary.of, workers[:-1])
        self._heads = [Local(boundary, LocalOptions()).to(device) for boundary in boundaries]
        self._weight = MixedOptions().local_weight

    def train_batch(self, x: Inputs, y_BY: Tensor) -> Tensor:
        loss = super().train_batch(x, y_BY)
        for head in self._heads:
            for optimizer in head.optimizers().values():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def _loss(self, outputs: Sequence[Tensor], y_BY: Tensor, part: Part) -> Tensor:
        loss = super()._loss(outputs, y_BY, part)
        for head, h_BH in zip(self._heads, outputs[:-1], strict=True):
            loss = loss + self._weight * self.loss.of_part(head.head(h_BH), y_BY, part)
        return loss


def read_chain(path: Path, changes: str) -> ChainSpec:
    """The chain of a file, into which ``changes``, a mapping as in the file, is merged."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    document = merged(_mapping(path.read_text(), str(path)), _mapping(changes, "--with"))
    return parse_chain(json.dumps(document), file=str(path))  # JSON is YAML


def merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A document with changes; what is a mapping in both is merged."""
    result = dict(document)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value
    return result


def read_methods(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Settings of modules by the methods' labels, backpropagation and the control first."""
    methods: dict[str, dict[str, Any]] = {BACKPROP: {}, CONTROL: {"interface": "none"}}
    for text in texts:
        label, _, value = text.partition("=")
        if text == HEADS:
            methods[HEADS] = {}
        if text in methods:
            continue
        if label in methods:
            raise UsageError(f"two methods have the label {label!r}", hint="choose another one")
        found = parse_yaml(value or label, text)[0]
        is_settings = isinstance(found, dict) and found.keys() <= ModuleDefaults.model_fields.keys()
        methods[label] = found if is_settings else {"interface": found}
    return methods


def by_method(chain: ChainSpec, settings: Mapping[str, Any]) -> ChainSpec:
    """The chain with the same settings in all modules; the last one has no interface."""
    document = chain.model_dump(mode="json", exclude_unset=True)
    document["defaults"] = {**document.get("defaults", {}), **settings}
    for module in document["modules"]:
        for key in settings:
            module.pop(key, None)
    return parse_chain(json.dumps(document), file=chain.name)


def by_rate(chain: ChainSpec, info: DataInfo, rate: float | None) -> ChainSpec:
    """The chain with one learning rate in all modules' optimizers; None: with its own.

    Optimizers of groups keep the ratio of their rate to the module's, if both are given.
    """
    if rate is None:
        return chain

    def with_rate(optimizer: Choice, rate: float) -> Choice:
        return Choice(name=optimizer.name, args={**optimizer.args, "lr": rate})

    def changed(module: ModuleSpec) -> ModuleSpec:
        assert module.optimizer is not None
        before, groups = module.optimizer.args.get("lr"), []
        for group in module.groups:
            if group.optimizer is not None:
                ratio = group.optimizer.args.get("lr", before) / before if before else 1.0
                optimizer = with_rate(group.optimizer, rate * ratio)
                group = group.model_copy(update={"optimizer": optimizer})
            groups.append(group)
        update = {"optimizer": with_rate(module.optimizer, rate), "groups": tuple(groups)}
        return module.model_copy(update=update)

    full = resolved_chain(chain, info)
    return full.model_copy(update={"modules": tuple(map(changed, full.modules))})


def train(chains: Mapping[str, ChainSpec], base: Path, one: Training) -> dict[str, float]:
    """Train once; gives the metric on the validation part and on the test set."""
    torch.set_num_threads(1)
    chain = chains[one["method"]].model_copy(update={"seed": one["seed"]})
    info = describe(chain.data, base)
    workers = worker_specs(by_rate(chain, info, one["lr"]), info)
    source = open_data(chain.data, base, seed=chain.seed)
    trained = _trainer(one["method"], workers, one["delay"])
    left = chain.steps
    for epoch in range(1, chain.epochs + 1):
        for x_BX, y_BY in islice(source.train_batches(epoch), left):
            trained.train_batch(x_BX, y_BY)
        trained.end_epoch()
        left = None if left is None else max(left - source.train_batch_count, 0)
    name = chain.metrics[0].name
    parts = {"validation": source.eval_batches, "test": source.test_batches}
    found = {}
    for part, batches in parts.items():
        found[part] = evaluate(trained.predict, batches(), workers[-1])[name]
        trained.end_evaluation()
    return found


def time_over_backprop(
    chains: Mapping[str, ChainSpec], base: Path, one: Training
) -> dict[str, float]:
    """CPU time of a chain over backpropagation's, by turns, so that both meet the same machine."""
    chain = chains[one["method"]]
    workers = worker_specs(chain, describe(chain.data, base))
    source = open_data(chain.data, base, seed=chain.seed)
    trainers = [_trainer(one["method"], workers, one["delay"]), Backprop(workers)]
    batches, ratios = islice(source.train_batches(1), STRETCHES * STRETCH), []
    while stretch := list(islice(batches, STRETCH)):
        taken = []
        for trainer in trainers:
            began = time.process_time()
            for x_BX, y_BY in stretch:
                trainer.train_batch(x_BX, y_BY)
            taken.append(time.process_time() - began)
        ratios.append(taken[0] / taken[1])
    return {"time": statistics.median(ratios)}


def compare(
    chain: ChainSpec,
    base: Path,  # folder
    methods: Mapping[str, dict[str, Any]],  # settings by label
    *,
    rates: Sequence[float] | None,  # None: the chain's
    seeds: int,  # trainings of each method with the rate that was chosen
    delays: Sequence[Delay],  # of true gradients; each is compared
    results: Path,  # JSON lines
    jobs: int = 1,  # at a time
) -> list[list[str]]:
    """Train what is missing; gives the table's rows."""
    chains = {label: by_method(chain, settings) for label, settings in methods.items()}
    rows: list[Training] = [
        {"chain": chain.name, "method": label, "spec": _digest(chains[label]), "delay": delay}
        for label in methods
        for delay in ([0] if label in (BACKPROP, CONTROL, HEADS) else delays)
    ]
    run = partial(measured, results, jobs=jobs)
    tried = [{**row, "lr": lr, "seed": 0} for row in rows for lr in rates or [None]]
    best = max if rises(chain.metrics[0]) else min
    chosen = []
    found = iter(run(tried, partial(train, chains, base)))
    for row in rows:
        of_row = [next(found) for _ in rates or [None]]
        chosen.append({**row, "lr": best(of_row, key=lambda one: one["validation"])["lr"]})
    wanted = [{**one, "seed": seed} for one in chosen for seed in range(seeds)]
    trained = run(wanted, partial(train, chains, base))
    timed = measured(results, [{**row, "lr": "any"} for row in rows], partial(
        time_over_backprop, chains, base
    ))  # fmt: skip
    by_row = [trained[at : at + seeds] for at in range(0, len(trained), seeds)]
    return _rows(chain.metrics[0], by_row, timed)


def _rows(
    metric: Choice, trained: Sequence[Sequence[Training]], timed: Sequence[Training]
) -> list[list[str]]:
    factor, digits = (100, 2) if metric.name in ("accuracy", "top5") else (1, 3)
    means = [statistics.fmean(one["test"] for one in row) for row in trained]
    top, floor = means[0], means[1]
    rows = []
    for row, mean, spent in zip(trained, means, timed, strict=True):
        one = row[0]
        within = one["method"] not in (BACKPROP, CONTROL, HEADS)
        rows.append(
            [
                one["method"],
                _shown(one["delay"]) if within else "",
                "" if one["lr"] is None else f"{one['lr']:g}",
                _spread([factor * one["validation"] for one in row], digits),
                _spread([factor * one["test"] for one in row], digits),
                f"{(mean - floor) / (top - floor):.0%}" if within and top != floor else "",
                f"{spent['time']:.2f}",
            ]
        )
    return rows


def _shown(delay: Delay) -> str:
    return "/".join(map(str, delay)) if isinstance(delay, list) else str(delay)


def _spread(values: Sequence[float], digits: int) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def _trainer(method: str, workers: Any, delay: Delay) -> Backprop | LocalChain:
    if method == HEADS:
        return BackpropWithHeads(workers)
    return Backprop(workers) if method == BACKPROP else LocalChain(workers, delay=delay)


def _digest(chain: ChainSpec) -> str:
    """What is trained, wherever the data lies."""
    document = chain.model_dump(mode="json", exclude={"seed": True, "data": {"path"}})
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


def _mapping(text: str, what: str) -> dict[str, Any]:
    found = parse_yaml(text, what)[0]
    if not isinstance(found, dict):
        raise UsageError(f"{what} is not a mapping")
    return found


def _numbers(kind: Callable[[str], Any], by: str = ",") -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(by)]


def _delay(text: str) -> Delay:
    return _numbers(int, "/")(text) if "/" in text else int(text)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chain", type=Path)
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--sweep", type=_numbers(float), help="learning rates: 3e-4,1e-3")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--delay",
        type=_numbers(_delay),
        default=[4],
        help="batches that gradients take up each link (4), or each of the links: 0/0/64",
    )
    parser.add_argument("--with", dest="changes", default="{}", help="changes of the chain: YAML")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "learning.jsonl")
    given = parser.parse_intermixed_args()
    keep_freed_memory()  # as workers do
    sys.path.insert(0, str(given.chain.parent))  # where the chain's import paths start
    try:
        chain, methods = read_chain(given.chain, given.changes), read_methods(given.methods)
        if chain.data.validation is None:
            raise UsageError(
                f"{given.chain}: learning rates are chosen on a validation part, there is none",
                hint="--with '{data: {validation: 5000}}'",
            )
        for delay in given.delay:
            if isinstance(delay, list) and len(delay) != len(chain.modules) - 1:
                raise UsageError(
                    f"--delay: {len(delay)} links; {chain.name!r} has {len(chain.modules) - 1}"
                )
        rows = compare(
            chain,
            given.chain.parent,
            methods,
            rates=given.sweep,
            seeds=given.seeds,
            delays=given.delay,
            results=given.results,
            jobs=given.jobs,
        )
    except DniError as error:
        sys.exit(str(error))
    header = ["method", "delay", "learning rate", "validation", "test", "gap closed", "time"]
    for line in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
