#!/usr/bin/env python3
"""Training throughput of a two-module chain beside its synchronous peers, over lines of any delay.

Everybody trains the same network on random images of Fashion-MNIST's shape that lie in memory, with
fused Adam and cross entropy, and reads them through ``dni_runtime.data``:

* ``single-1``, ``single-2``: one process, plain backprop, 1 or 2 threads; there is no line;
* ``ddp``: two processes with half a batch each (torch.nn.parallel.DistributedDataParallel, gloo);
* ``gpipe-M``, ``1f1b-M``, ``interleaved-M``, ``zbv-M`` …: torch.distributed.pipelining's schedules
  on two processes with M micro-batches (gloo); ``gpipe-1`` is plain model parallelism;
* ``chain``: two modules, each served by a worker of its own, synthetic gradients;
* ``delayed``: the same, with true gradients that come late, and no synthesizer;
* ``chain-bf16``, ``chain-int8``, ``delayed-bf16``: the same with narrower types on the wire.

Without a delay and a rate the two processes talk through loopback. Otherwise each has a network
namespace of its own, and all they say to each other goes through ``peers/slow_link.c``, a new one
for each run; that needs root, or /dev/net/tun and user namespaces. What TCP finds the line to be
like is shown first.

Each repetition runs each contender once, from a different start in the list, so that a change in
the machine's load meets all of them; ratios are taken within a repetition. Rates are those of the
steady state: start and warm-up are left out. CPU time and busy cores are the processes' own, with
all their threads. The cores that other programs kept busy meanwhile are shown beside each rate:
near 0 on a machine of one's own, but for the line's own few per cent.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.chain import CHAINS, measure_chain, window_for
from peers.networks import NETWORKS, write_data
from peers.report import Contender, Outcome, draw, summarize, table
from peers.slow_link import Line, LinkError, PrivilegeError, build_slow_link, open_link, probe
from peers.synchronous import SCHEDULES, SINGLE, Measured, Timing, measure_synchronous

from dni_runtime.errors import DniError

CONTENDERS = (*SINGLE, "ddp", *SCHEDULES, *CHAINS)
QUIET_TRIES = 4
_UNITS = {"gbit": 1000.0, "mbit": 1.0, "kbit": 0.001}


@dataclass(frozen=True)
class Bench:
    """What all measurements have in common.

    Attributes:
        network: Name of the network.
        folder: Where the data and the runs lie.
        timing: How long each contender trains.
        step_s: About how long one of two modules computes for a batch.
        window: Batches in flight in a chain; None to choose.
        learn_every: Of how many late gradients the synthesizer learns from one.
        quiet: Measure again, a few times at most, where others kept more than so many cores busy.
        program: What makes slow lines; None where there are none.
    """

    network: str
    folder: Path
    timing: Timing
    step_s: float
    window: int | None
    learn_every: int
    quiet: float
    program: Path | None

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
            if name in CHAINS:
                network, dtype = NETWORKS[self.network], CHAINS[name][1]
                every = self.learn_every if CHAINS[name][0] != "delayed" else 1
                window = self.window or window_for(network, dtype, line, self.step_s, every)
                measured = measure_chain(
                    name, self.network, self.folder, self.timing,
                    cut=contender.cut, window=window, learn_every=self.learn_every, link=link,
                )  # fmt: skip
            else:
                measured = measure_synchronous(
                    name, self.network, self.folder, self.timing, contender.cut, link
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


def wait_until_quiet(quiet: float) -> None:
    """Wait, two minutes at most, for a second in which others use no more than ``quiet`` cores."""
    deadline = time.monotonic() + 120
    while quiet < (os.cpu_count() or 1) and time.monotonic() < deadline:
        before = busy()
        time.sleep(1)
        if cores(before, busy()) <= quiet:
            return


def cores(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Cores that others kept busy between two answers of :func:`busy`."""
    return max(0.0, (after[1] - before[1]) / (after[0] - before[0]))


def busy() -> tuple[float, float]:
    """The clock, and the CPU seconds that programs other than ours have used so far (proc(5))."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft_interrupts, steal = fields
    ticks = user + nice + system + interrupts + soft_interrupts + steal
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def facts() -> dict[str, Any]:
    """The machine and the software, as far as they bear on the figures."""
    import torch

    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mkl": torch.backends.mkl.is_available(),
    }


def parse_rate(text: str) -> float:
    """Megabits a second of ``1gbit``, ``100mbit``, ``64kbit`` or ``unlimited`` (0).

    Raises:
        ValueError: It is none of these.
    """
    if text == "unlimited":
        return 0.0
    for unit, factor in _UNITS.items():
        if text.endswith(unit) and float(text.removesuffix(unit)) > 0:
            return float(text.removesuffix(unit)) * factor
    raise ValueError(f"{text!r} is no rate: write unlimited, 1gbit or 100mbit")


def parse_delay(text: str) -> float:
    """Milliseconds.

    Raises:
        ValueError: It is negative or no number.
    """
    if not 0 <= float(text) <= 10_000:
        raise ValueError(f"{text!r} is no delay")
    return float(text)


def chosen(patterns: str) -> list[str]:
    """The contenders whose names match one of several patterns with commas between them.

    Raises:
        ValueError: A pattern matches none.
    """
    names: dict[str, None] = {}
    for pattern in patterns.split(","):
        found = fnmatch.filter(CONTENDERS, pattern)
        if not found:
            raise ValueError(f"no contender {pattern!r}; there are {', '.join(CONTENDERS)}")
        names |= dict.fromkeys(found)
    return [name for name in CONTENDERS if name in names]


def contenders_of(
    names: Sequence[str], peer_cuts: Sequence[int | None], chain_cuts: Sequence[int | None]
) -> list[Contender]:
    """Each name with each cut that applies to it."""
    found: dict[Contender, None] = {}
    for name in names:
        two = name in SCHEDULES and SCHEDULES[name][1] == 1
        cuts = chain_cuts if name in CHAINS else peer_cuts if two else (None,)
        found |= dict.fromkeys(Contender(name, cut) for cut in cuts)
    return list(found)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""

    def listed(kind: Any) -> Any:
        def read(text: str) -> list[Any]:
            try:
                return [kind(part) for part in text.split(",")]
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        return read

    def names(text: str) -> list[str]:
        try:
            return chosen(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NETWORKS, default="mlp-1024")
    parser.add_argument(
        "--delay-ms", type=listed(parse_delay), default=[0.0], metavar="MS,…",
        help="one-way delays; 0 with an unlimited rate is loopback (default)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=listed(parse_rate), default=[0.0], metavar="RATE,…",
        help="unlimited (default), 1gbit, 100mbit, …; each with each delay",
    )  # fmt: skip
    parser.add_argument(
        "--contenders", type=names, default=list(CONTENDERS), metavar="PATTERN,…",
        help=f"of: {', '.join(CONTENDERS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="timed, for each contender")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before that")
    parser.add_argument("--window", type=int, help="of chains (default: chosen for each line)")
    parser.add_argument("--learn-every", type=int, default=4, help="see the synthetic interface")
    parser.add_argument(
        "--peer-split", type=listed(int), default=[None], metavar="LAYERS,…",
        help="layers in the first process of schedules with two stages; several are compared",
    )  # fmt: skip
    parser.add_argument(
        "--chain-split", type=listed(int), default=[None], metavar="LAYERS,…",
        help="the same for the chain's first module",
    )  # fmt: skip
    parser.add_argument(
        "--quiet", type=float, default=float("inf"), metavar="CORES",
        help="on a shared machine: wait for, and measure again without, more foreign load",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, help="keep the data and the chains' runs here (default: nowhere)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw rates against delays")
    arguments = parser.parse_args(argv)
    layers = len(NETWORKS[arguments.network].layers)
    for cut in (*arguments.peer_split, *arguments.chain_split):
        if cut is not None and not 0 < cut < layers:
            parser.error(f"{cut} is no place to cut {layers} layers")
    if arguments.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install 'dni-runtime[plot]'")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = parse(argv)
    contenders = contenders_of(arguments.contenders, arguments.peer_split, arguments.chain_split)
    lines = [Line(delay, rate) for rate in arguments.rate for delay in arguments.delay_ms]
    timing = Timing(arguments.warmup, arguments.seconds)
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dni-bench-"))
        )
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder)
        machine = facts()
        program, probed = None, {}
        if not all(line.loopback for line in lines):
            try:
                program = build_slow_link(folder)
                for line in lines:
                    if not line.loopback:
                        with open_link(program, line) as link:
                            probed[line] = {**probe(link, line), **link.facts}
                        progress(f"{line}: {_shown(probed[line])}")
            except LinkError as error:
                progress(f"no slow line can be made here: {error}")
                return 77 if isinstance(error, PrivilegeError) else 69  # as in sysexits(3)
        # The chain's window is chosen by its modules' pace on a machine of their own: half of what
        # one process computes, in CPU time, which other programs do not change.
        cpu_s = min(
            measure_synchronous("single-1", arguments.network, folder, short, None, None).cpu_s
            for short in 2 * [Timing(0.5, 1.0)]
        )
        bench = Bench(
            network=arguments.network,
            folder=folder,
            timing=timing,
            step_s=NETWORKS[arguments.network].batch * cpu_s / 2,
            window=arguments.window,
            learn_every=arguments.learn_every,
            quiet=arguments.quiet,
            program=program,
        )
        outcomes = measure_all(bench, lines, contenders, arguments.repetitions)
    found = [summarize(line, outcomes[line], probed.get(line, {})) for line in lines]
    print(" ".join(f"{name}={value}" for name, value in machine.items()))
    print(f"network={arguments.network} repetitions={arguments.repetitions}")
    for line, one in zip(lines, found, strict=True):
        print(f"\n{table(line, one)}")
    print("\nRatios: medians of those within a repetition. @N: layers in the first process.")
    document = {
        "machine": machine, "network": arguments.network, "step_s": bench.step_s,
        "warmup_s": timing.warmup_s, "seconds": timing.seconds, "lines": found,
    }  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.plot is not None:
        draw(found, f"{arguments.network}, two processes", arguments.plot)
    measured = [
        run for by in outcomes.values() for outcome in by.values() for run in outcome.measured
    ]
    return 0 if measured else 1


def _shown(probed: dict[str, Any]) -> str:
    return (
        f"round trip {probed['rtt_ms']:.2f} ms, {probed['mbit_per_s']:.0f} Mbit/s, TCP "
        f"{probed['congestion']}{'' if probed['prompt'] else ', without priority'}"
    )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
