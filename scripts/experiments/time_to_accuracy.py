#!/usr/bin/env python3
"""Seconds to an accuracy over a slow line: real chains and their peers, trained until they have it.

``mlp-1024`` and its like learn MNIST until their test accuracy reaches the target; ``lm`` learns a
text (the sources of Python's standard library, or ``--text``) until it needs no more than so many
bits for a character of parts that are held out. Contenders, lines and processes are those of
``scripts/experiments/bench_peers.py``, but everybody reads the same samples in the same order
(``peers/streams.py``), and starts from weights drawn anew with each seed.

Everybody is evaluated after so many batches (``--every``; those that average replicas at the next
average), in its own processes, on all held-out samples. The clock is that of the process with the
network's output: it runs from the end of one evaluation to the end of the last batch before the
next one, so that evaluation costs nobody anything. What it cannot leave out:

* the target is noticed at an evaluation, up to so many batches too late, by everybody alike;
* an evaluation ends waiting: messages that are under way when it begins have arrived when it ends,
  and the first batch of the next interval may be computed upstream meanwhile. That saves everybody
  about a round trip an interval;
* a chain's late gradients arrive while it is evaluated, so that of each interval as many batches as
  the window is wide find fresher weights. Asynchronous pipelines keep their order;
* samples come one by one through a data set of Python's: about 1 ms of CPU for 256 images in each
  process that reads (a chain's head; both ends of a pipeline; every replica), mostly in a thread.

So an interval should be long beside the window: ten times as long by default. Where replicas share
after every H batches, and at evaluations, it should be a multiple of H.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.chain import chain_spec, train_chain, window_for
from peers.contenders import SINGLE, SYNCHRONOUS, Contender, computes, kind_of
from peers.machine import busy, cores, facts
from peers.networks import CONTEXT, NETWORKS, write_data, write_sources
from peers.options import add_options, check_options, contenders, lines
from peers.processes import step_seconds, train_peer
from peers.report import align, ratios
from peers.slow_link import Line, Link, LinkError, PrivilegeError, open_link, prepare_lines
from peers.streams import library_text, write_mnist, write_text
from reproduce_paper import folder_of

from dni_runtime.errors import DniError

TARGETS = {"lm": 2.2}
ACCURACY = 0.98
"""The targets that are used where none is given: bits per character, and of MNIST."""

PATIENCE_S = 180.0
"""Seconds for starting and evaluating, on top of twice the longest training."""


@dataclass(frozen=True)
class Trained:
    """What one training of one contender gave."""

    seconds: float | None = None  # of training until the target was met; None: it was not
    batches: int | None = None  # the same in batches
    batch_s: float | None = None  # over the whole training
    evaluations: Sequence[dict[str, Any]] = ()
    foreign: float = 0.0  # cores that other programs kept busy meanwhile
    window: int | None = None  # batches in flight on a chain's links
    error: str | None = None  # why it failed


@dataclass(frozen=True)
class Bench:
    """What all trainings have in common."""

    network: str
    modules: int  # of the chains
    folder: Path  # of the data and the runs
    data: Path  # file
    target: float  # accuracy from 0 to 1, or bits per character
    every: int  # batches between evaluations
    most_batches: int  # then it is given up
    most_s: float  # of training; then it is given up
    step_s: float  # about how long each end of the line computes for a batch
    window: int | None  # batches in flight in a chain; None: chosen
    learn_every: int  # the synthesizer learns from every n-th late gradient
    program: Path | None  # makes slow lines; None: there are none

    def train(self, contender: Contender, line: Line, seed: int) -> Trained:
        """Train one contender until it meets the target, or is given up."""
        evaluations: list[dict[str, Any]] = []
        deadline = time.monotonic() + 2 * self.most_s + PATIENCE_S

        def enough(found: list[dict[str, Any]]) -> bool:
            evaluations[:] = found
            if self.met(found) is None and time.monotonic() > deadline:
                raise RuntimeError("it takes too long to start, or to be evaluated")
            last = found[-1] if found else {"batches": 0, "train_s": 0.0}
            given_up = last["batches"] >= self.most_batches or last["train_s"] >= self.most_s
            return given_up or self.met(found) is not None

        window, error, before = None, None, busy()
        if kind_of(contender.name)[0] == "chain":
            window = self.window or window_for(
                contender.name, NETWORKS[self.network], line, self.step_s, self.learn_every
            )
        try:
            with contextlib.ExitStack() as stack:
                link = None
                if not line.loopback:
                    assert self.program is not None
                    link = stack.enter_context(open_link(self.program, line))
                if window is not None:
                    spec = self._chain(contender, seed, window, link)
                    train_chain(contender, spec, self.folder, link, enough)
                else:
                    job = {
                        "network": self.network, "data": self._data(seed), "seed": seed,
                        "every": self.every,
                    }  # fmt: skip
                    train_peer(contender, self.modules, job, self.folder, link, enough)
        except (RuntimeError, DniError, OSError, ValueError, KeyError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        met = self.met(evaluations) if error is None else None
        last = evaluations[-1] if evaluations else None
        return Trained(
            seconds=met["train_s"] if met else None,
            batches=met["batches"] if met else None,
            batch_s=last["train_s"] / last["batches"] if last else None,
            evaluations=evaluations,
            foreign=cores(before, busy()),
            window=window,
            error=error,
        )

    def met(self, evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The first evaluation that meets the target."""
        network = NETWORKS[self.network]
        for one in evaluations:
            value = one[network.metric]  # None: not a number, diverged
            if value is not None and (
                value <= self.target if network.tokens else value >= self.target
            ):
                return one
        return None

    def _data(self, seed: int) -> dict[str, Any]:
        network = NETWORKS[self.network]
        return {
            "dataset": "streams:Stream",
            "path": str(self.data),
            "args": {"length": self.every * network.batch, "seed": seed},
            "batch_size": network.batch,
            "flatten": network.flatten,
            "shuffle": False,
        }

    def _chain(
        self, contender: Contender, seed: int, window: int, link: Link | None
    ) -> dict[str, Any]:
        """A chain whose epochs are the intervals between evaluations."""
        spec = chain_spec(
            contender.name,
            NETWORKS[self.network],
            self._data(seed),
            modules=self.modules,
            cut=contender.cut,
            window=window,
            learn_every=self.learn_every,
            remote=link is not None,
        )
        forever = -(-self.most_batches // self.every) + 1
        return {**spec, "seed": seed, "epochs": forever, "checkpoint": {"every_epochs": 0}}


Results = dict[tuple[Line, Contender], list[Trained]]


def train_all(bench: Bench, over: Sequence[Line], who: Sequence[Contender], seeds: int) -> Results:
    """Everybody with each seed, over each line; who comes first changes with the seed."""
    results: Results = {(where(line, one), one): [] for line in over for one in who}
    for seed, line in itertools.product(range(seeds), over):
        turn = seed * len(who) // seeds
        for contender in (*who[turn:], *who[:turn]):
            trained = results[where(line, contender), contender]
            if len(trained) == seed:  # one process needs no line: it is the same over all
                trained.append(bench.train(contender, line, seed))
                progress(f"seed {seed}, {line}: {contender}: {told(trained[-1], bench)}")
    return results


def where(line: Line, contender: Contender) -> Line:
    """The line, for those that need one."""
    return Line() if contender.name in SINGLE else line


def told(one: Trained, bench: Bench) -> str:
    """One training in a few words."""
    if one.error is not None:
        return one.error
    values = [str(evaluation[NETWORKS[bench.network].metric]) for evaluation in one.evaluations]
    if one.seconds is None:
        return f"not reached in {len(values) * bench.every} batches: {', '.join(values[-3:])}"
    return f"{one.seconds:.1f} s, {one.batches} batches (others: {one.foreign:.2f} cores)"


def best_peer(results: Results, line: Line) -> Contender | None:
    """Of the synchronous peers on several processes, the soonest one on average."""
    means = {
        contender: statistics.mean(one.seconds for one in trained if one.seconds is not None)
        for (at, contender), trained in results.items()
        if at == line and contender.name in SYNCHRONOUS
        if all(one.seconds is not None for one in trained)
    }
    return min(means, key=lambda contender: means[contender]) if means else None


def table(results: Results, line: Line, who: Sequence[Contender]) -> list[str]:
    """Means over the seeds, with the ranges."""
    best = best_peer(results, line)
    base = [one.seconds for one in results[line, best]] if best else None
    rows = [
        (
            "contender", "computes", "seeds", "batches", "ms/batch", "seconds",
            f"sooner than {best or 'best peer'}", "window", "others",
        )
    ]  # fmt: skip
    for contender in who:
        trained = results[where(line, contender), contender]
        reached = [one for one in trained if one.seconds is not None]
        seconds = [one.seconds for one in trained]
        pace = [1000 * one.batch_s for one in trained if one.batch_s is not None]
        windows = {one.window for one in trained if one.window is not None}
        rows.append(
            (
                str(contender),
                computes(contender.name),
                f"{len(reached)}/{len(trained)}",
                spread([one.batches for one in reached if one.batches is not None], 0),
                spread(pace, 1),
                spread([one.seconds for one in reached if one.seconds is not None], 1),
                spread(ratios(base, seconds), 2) if base is not None else "-",
                "/".join(map(str, sorted(windows))) or "-",
                f"{statistics.mean(one.foreign for one in trained):.2f}",
            )
        )
    errors = [
        f"{contender}: {one.error}"
        for contender in who
        for one in results[where(line, contender), contender]
        if one.error is not None
    ]
    return [*align(rows), *dict.fromkeys(errors)]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and range."""
    if not values:
        return "-"
    shown = [f"{x:.{digits}f}" for x in (statistics.mean(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]}-{shown[2]})" if len(values) > 1 else shown[0]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--target", type=float,
        help=f"accuracy from 0 to 1 (default: {ACCURACY}); of lm: bits per character "
        f"(default: {TARGETS['lm']})",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each (default: 3)")
    parser.add_argument("--every", type=int, default=100, help="batches between evaluations")
    parser.add_argument("--most-batches", type=int, default=4000, help="give up after so many")
    parser.add_argument(
        "--most-seconds", type=float, default=600.0, help="give up after so long a training"
    )
    parser.add_argument("--mnist", help="folder of the four IDX files (default: fetched)")
    parser.add_argument(
        "--text", type=Path, help="what lm learns (default: Python's standard library)"
    )
    arguments = parser.parse_args(argv)
    check_options(parser, arguments)
    if arguments.target is None:
        arguments.target = TARGETS.get(arguments.network, ACCURACY)
    if min(arguments.seeds, arguments.every, arguments.most_batches) < 1:
        parser.error("--seeds, --every and --most-batches are 1 or more")
    if arguments.text is not None and not arguments.text.is_file():
        parser.error(f"--text: there is no file {str(arguments.text)!r}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Train everybody, and print a table for each line."""
    arguments = parse(argv)
    over, who = lines(arguments), contenders(arguments)
    network = NETWORKS[arguments.network]
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dni-bench-"))
        )
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_data(network, folder)
        write_sources(folder)
        if network.tokens:
            text = arguments.text.read_bytes() if arguments.text else library_text()
            data = write_text(folder, text, CONTEXT)
        else:
            data = write_mnist(folder, folder_of("mnist", arguments.mnist))
        try:
            program, _ = prepare_lines(over, folder, progress)
        except LinkError as error:
            progress(f"no slow line can be made here: {error}")
            return 77 if isinstance(error, PrivilegeError) else 69  # as in sysexits(3)
        machine = facts()
        bench = Bench(
            network=arguments.network,
            modules=arguments.modules,
            folder=folder,
            data=data,
            target=arguments.target,
            every=arguments.every,
            most_batches=arguments.most_batches,
            most_s=arguments.most_seconds,
            step_s=step_seconds(arguments.network, folder),
            window=arguments.window,
            learn_every=arguments.learn_every,
            program=program,
        )
        results = train_all(bench, over, who, arguments.seeds)
    print(" ".join(f"{name}={value}" for name, value in machine.items()))
    print(
        f"network={arguments.network} modules={arguments.modules} seeds={arguments.seeds} "
        f"target={arguments.target:g} ({network.metric}) every={arguments.every}"
    )
    for line in over:
        print(f"\n{line}:", *table(results, line, who), sep="\n")
    print(
        "\nMeans (ranges) over the seeds. @N: layers in the first of two parts. xN: on N processes."
    )
    if arguments.json is not None:
        rows = [
            {
                "delay_ms": line.delay_ms, "rate_mbit": line.rate_mbit or None,
                "name": str(contender), "computes": computes(contender.name),
                "trainings": [asdict(one) for one in trained],
            }
            for (line, contender), trained in results.items()
        ]  # fmt: skip
        options = {key: str(item) for key, item in vars(arguments).items() if key != "contenders"}
        document = {"machine": machine, "options": options, "contenders": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if any(one.error is None for trained in results.values() for one in trained) else 1


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
