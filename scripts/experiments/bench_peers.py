#!/usr/bin/env python3
"""Training throughput of a chain beside its peers, over lines of any delay and rate.

Everybody trains the same network on random images of Fashion-MNIST's shape, or (``lm``, a causal
transformer of four blocks) on random characters, that lie in memory; with fused Adam and cross
entropy, and reads them through ``dni_runtime.data``. Each process computes in one thread. Peers
that compute what plain backpropagation computes (but that each micro-batch and each share of a
batch is batch-normalised by itself):

* ``single-1``, ``single-2``: one process, 1 or 2 threads; there is no line;
* ``ddp``: every process has the network and a share of each batch
  (torch.nn.parallel.DistributedDataParallel, gloo);
* ``gpipe-M``, ``1f1b-M``: torch.distributed.pipelining's schedules, one stage in each process, with
  M micro-batches (gloo); ``gpipe-1`` is plain model parallelism;
* ``bfs-M``, ``interleaved-M``, ``izb-M``, ``zbv-M``, ``dualpipev-M``: the same with four stages on
  two processes.

Peers that compute something else:

* ``local-sgd-H``: two replicas, each with half of each batch, averaged after every H batches;
* ``diloco-H``: the same with AdamW inside and one step of Nesterov's momentum outside after every H
  batches (arXiv:2311.08105);
* ``torchft-local-sgd-H``, ``torchft-diloco-H``: the same two by torchft, if it is installed;
* ``2bw-M``: 1F1B without a flush, M micro-batches to an update, gradients of weights that are one
  update old (PipeDream-2BW, arXiv:2006.09503);
* ``async-1f1b``: 1F1B without a flush, an update after each batch, gradients of the weights that
  its forward had (PipeDream's weight stashing, arXiv:1806.03377); ``async-1f1b-K``: with up to K
  batches under way across the line.

And chains, whose every module is served by a worker of its own:

* ``chain``: synthetic gradients; ``mixed``: these and local heads (the default interface);
  ``true-lessons``: the same with lessons from true gradients;
* ``local``: local heads alone, no gradient travels;
* ``delayed``: true gradients that come late, and no synthesizer; ``late-1``: at most one update
  late, by predicted weights (the default interface with attention);
* ``exact-4``, ``exact-8``: backpropagation with so many micro-batches;
* ``chain-bf16``, ``chain-int8``, ``delayed-bf16``: the same with narrower types on the wire;
* ``mixed+local-sgd-H`` and its like, with ``diloco`` or ``parameter-server``: two replicas of each
  module, which share after every H batches of both, a whole chain at each end of the line;
  ``whole+local-sgd-H``: two replicas of a chain of one module, the whole network. Each batch goes
  to one of the two, so each replica makes H / 2 steps between two averages, where those above make
  H with halves of batches. A batch counts if either was trained on it.

Chains have ``--modules`` modules. So many processes have ddp, gpipe, 1f1b, 2bw and async-1f1b, or
as many as ``--processes`` says: ``gpipe-2 x4`` is on four.

Without a delay and a rate the processes talk through loopback. Otherwise there are two network
namespaces, with half of the processes in each, and all that one half says to the other goes through
``peers/slow_link.c``, a new one for each run; that needs root, or /dev/net/tun and user namespaces.
What TCP finds the line to be like is shown first.

Each repetition runs each contender once, from a different start in the list, so that a change in
the machine's load meets all of them; ratios are taken within a repetition: over the best peer that
computes plain backpropagation on several processes, and over the best of the others. Rates are
those of the steady state: start and warm-up are left out. CPU time and busy cores are the
processes' own, with all their threads. The cores that other programs kept busy meanwhile are shown
beside each rate: near 0 on a machine of one's own, but for the line's own few per cent.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers.chain import measure_chain, window_for
from peers.contenders import SINGLE, Contender, kind_of
from peers.machine import busy, cores, facts, wait_until_quiet
from peers.networks import NETWORKS, write_data, write_sources
from peers.options import add_options, check_options, contenders, lines
from peers.processes import Measured, Timing, measure_peer, step_seconds
from peers.report import Outcome, draw, summarize, table
from peers.slow_link import Line, LinkError, PrivilegeError, open_link, prepare_lines

from dni_runtime.errors import DniError

QUIET_TRIES = 4


@dataclass(frozen=True)
class Bench:
    """What all measurements have in common."""

    network: str
    modules: int  # of the chains
    folder: Path  # of the data and the runs
    timing: Timing  # of each contender
    step_s: float  # about how long each end of the line computes for a batch
    window: int | None  # batches in flight in a chain; None: chosen
    learn_every: int  # the synthesizer learns from every n-th late gradient
    quiet: float  # if others kept more cores busy, measure again, a few times at most
    program: Path | None  # makes slow lines; None: there are none

    def measure(self, contender: Contender, line: Line) -> tuple[Measured, float]:
        """What a contender reaches, and the cores that others kept busy meanwhile."""
        best: tuple[Measured, float] | None = None
        for _ in range(QUIET_TRIES):
            wait_until_quiet(self.quiet)
            before = busy()
            measured = self._measure(contender, line)
            foreign = cores(before, busy())
            if best is None or foreign < best[1]:
                best = measured, foreign
            if foreign <= self.quiet:
                break
        assert best is not None
        return best

    def _measure(self, contender: Contender, line: Line) -> Measured:
        name = contender.name
        with contextlib.ExitStack() as stack:
            link = None
            if not line.loopback and name not in SINGLE:
                assert self.program is not None
                link = stack.enter_context(open_link(self.program, line))
            if kind_of(name)[0] == "chain":
                window = self.window or window_for(
                    name, NETWORKS[self.network], line, self.step_s, self.learn_every
                )
                measured = measure_chain(
                    contender, self.network, self.modules, self.folder, self.timing,
                    window=window, learn_every=self.learn_every, link=link,
                )  # fmt: skip
            else:
                measured = measure_peer(
                    contender, self.network, self.modules, self.folder, self.timing, link
                )
        if link is None:
            return measured
        return replace(measured, details={**measured.details, "link": link.carried})


def measure_all(
    bench: Bench, lines: Sequence[Line], contenders: Sequence[Contender], repetitions: int
) -> dict[Line, dict[Contender, Outcome]]:
    """All contenders in turn, over each line in turn; one that fails there is not tried again."""
    outcomes = {line: {contender: Outcome() for contender in contenders} for line in lines}
    for repetition, line in itertools.product(range(repetitions), lines):
        turn = repetition * len(contenders) // repetitions
        for contender in (*contenders[turn:], *contenders[:turn]):
            outcome = outcomes[line][contender]
            where = f"{repetition + 1}/{repetitions} {line}: {contender}"
            if outcome.error is not None:
                outcome.runs.append(None)
                continue
            try:
                measured, foreign = bench.measure(contender, line)
            except (RuntimeError, DniError, OSError, ValueError, KeyError) as error:
                outcome.error = f"{type(error).__name__}: {error}"
                outcome.runs.append(None)
                progress(f"{where}: {outcome.error}")
                continue
            outcome.runs.append(measured)
            outcome.foreign.append(foreign)
            progress(
                f"{where}: {measured.rate:.0f} samples/s, {sum(measured.cores):.2f} cores "
                f"(others: {foreign:.2f}){_doubts(measured)}"
            )
    return outcomes


def _doubts(measured: Measured) -> str:
    """What makes the line's part in a measurement doubtful."""
    carried = measured.details.get("link", {})
    doubts = [
        f"{carried[what]} {what}" for what in ("dropped", "retransmitted") if carried.get(what)
    ]
    return f" [packets: {', '.join(doubts)}]" if doubts else ""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="timed, for each contender")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before that")
    parser.add_argument(
        "--quiet", type=float, default=float("inf"), metavar="CORES",
        help="on a shared machine: wait for, and measure again without, more foreign load",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw rates against delays")
    arguments = parser.parse_args(argv)
    check_options(parser, arguments)
    if arguments.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install 'dni-runtime[plot]'")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = parse(argv)
    over = lines(arguments)
    timing = Timing(arguments.warmup, arguments.seconds)
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dni-bench-"))
        )
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_data(NETWORKS[arguments.network], folder)
        write_sources(folder)
        machine = facts()
        try:
            program, probed = prepare_lines(over, folder, progress)
        except LinkError as error:
            progress(f"no slow line can be made here: {error}")
            return 77 if isinstance(error, PrivilegeError) else 69  # as in sysexits(3)
        bench = Bench(
            network=arguments.network,
            modules=arguments.modules,
            folder=folder,
            timing=timing,
            step_s=step_seconds(arguments.network, folder),
            window=arguments.window,
            learn_every=arguments.learn_every,
            quiet=arguments.quiet,
            program=program,
        )
        outcomes = measure_all(bench, over, contenders(arguments), arguments.repetitions)
    found = [summarize(line, outcomes[line], probed.get(line, {})) for line in over]
    print(" ".join(f"{name}={value}" for name, value in machine.items()))
    print(
        f"network={arguments.network} modules={arguments.modules} "
        f"repetitions={arguments.repetitions}"
    )
    for line, one in zip(over, found, strict=True):
        print(f"\n{table(line, one)}")
    print(
        "\nRatios: medians of those within a repetition. @N: layers in the first of two parts. "
        "xN: on N processes."
    )
    document = {
        "machine": machine, "network": arguments.network, "modules": arguments.modules,
        "step_s": bench.step_s, "warmup_s": timing.warmup_s, "seconds": timing.seconds,
        "lines": found,
    }  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.plot is not None:
        draw(found, f"{arguments.network}, {arguments.modules} modules", arguments.plot)
    measured = [
        run for by in outcomes.values() for outcome in by.values() for run in outcome.measured
    ]
    return 0 if measured else 1


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
