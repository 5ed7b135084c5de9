#!/usr/bin/env python3
"""A chain's rate and processor time in two trees of this project, on a machine that is not quiet.

``bench_trees.py BEFORE AFTER`` starts ``bench_peers.py`` in both (each with the Python of its
``build/venv``, if it has one), stops the workers of both with SIGSTOP, and lets them go on in turns
of two seconds on the same cores, in the order a b, b a. What other programs take away for longer
than that, they take from both; a turn that is not fair is one of many, of which medians are taken.

A turn that is lost counts for little in the median, and fully in the ratio of all turns together:
where the two differ, the machine was too busy to tell. ``TREE TREE`` twice shows by how much.

The exit code is 1 if either is below ``--at-least``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dni_runtime.worker.ledger import Counts

TURN_S = 2.0
START_S = 180.0
BENCH = "scripts/experiments/bench_peers.py"
FILLED = 100  # messages after which the windows are full and every buffer has its size
MODULES = ("head", "tail")
_TICKS = os.sysconf("SC_CLK_TCK")


class Tree:
    """The workers of a chain that one tree trains without end, stopped but for their turns."""

    def __init__(self, root: Path, folder: Path, contender: str, how: list[str]) -> None:
        self.rates: list[float] = []  # messages per second, of each turn
        self.cpu_s: list[float] = []  # of all workers, for a message
        self._log = folder / "log"
        python = root / "build/venv/bin/python"
        command = [python if python.exists() else sys.executable, BENCH]
        endless = ["--contenders", contender, "--repetitions", "1", "--seconds", "1e6"]
        with self._log.open("w") as log:
            self._bench = subprocess.Popen(
                [*command, *endless, *how, "--folder", folder], cwd=root, stdout=log, stderr=log
            )
        self._folder = folder

    def begin(self) -> None:
        """Wait until the windows are full, and stop."""
        run = self._run()
        self._ledger = run / "ledger" / f"{MODULES[-1]}.json"
        records = (run / "workers" / f"{module}.json" for module in MODULES)
        self._pids = [json.loads(record.read_text())["pid"] for record in records]
        self._signal(signal.SIGSTOP)

    def _run(self) -> Path:
        """The run directory, when its windows are full."""
        deadline = time.monotonic() + START_S
        while self._bench.poll() is None and time.monotonic() < deadline:
            for ledger in self._folder.glob(f"*/run/ledger/{MODULES[-1]}.json"):
                counts = Counts.read(ledger)
                if counts is not None and counts.id >= FILLED:
                    return ledger.parents[1]
            time.sleep(0.2)
        raise SystemExit(f"no chain of two modules has begun:\n{self._log.read_text()}")

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def _state(self) -> tuple[int, float]:
        """The tail's newest message, and the seconds of processor time of all workers."""
        counts = Counts.read(self._ledger)
        assert counts is not None
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in self._pids]
        return counts.id, sum(sum(map(int, stat.split()[11:13])) for stat in stats) / _TICKS

    def turn(self) -> None:
        id, cpu_s = self._state()
        began_s = time.monotonic()
        self._signal(signal.SIGCONT)
        time.sleep(TURN_S)
        self._signal(signal.SIGSTOP)
        seconds = time.monotonic() - began_s
        time.sleep(0.05)  # until they have stopped
        id_after, cpu_s_after = self._state()
        done = max(id_after - id, 1)
        self.rates.append(done / seconds)
        self.cpu_s.append((cpu_s_after - cpu_s) / done)

    def end(self) -> None:
        """End the measurement, whose own clean-up takes the workers and the line away."""
        with contextlib.suppress(AttributeError, ProcessLookupError):
            self._signal(signal.SIGCONT)
        while self._bench.poll() is None:
            self._bench.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._bench.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--contenders", default="chain,mixed,delayed,exact-4")
    parser.add_argument("--network", default="mlp-1024")
    parser.add_argument("--delay-ms", default="0", help="of the line, one way; 0: loopback")
    parser.add_argument("--window", default="12", help="batches in flight")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each tree and contender")
    parser.add_argument("--at-least", type=float, default=0.98, metavar="RATIO")
    arguments = parser.parse_args()
    how = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in
           ("network", "delay-ms", "window")]  # fmt: skip
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it, for all
    slower = False
    for contender in arguments.contenders.split(","):
        with tempfile.TemporaryDirectory(prefix="dni-trees-") as name, contextlib.ExitStack() as up:
            trees = []
            for which, root in enumerate(arguments.trees):
                (folder := Path(name, str(which))).mkdir()
                trees.append(Tree(root.resolve(), folder, contender, how))
                up.callback(trees[-1].end)
                trees[-1].begin()
            for turn in range(max(round(arguments.seconds / TURN_S), 2)):
                for tree in reversed(trees) if turn % 2 else trees:
                    tree.turn()
        rates, cpu_s = (
            [after / before for before, after in zip(*both, strict=True)]
            for both in ([tree.rates for tree in trees], [tree.cpu_s for tree in trees])
        )
        low, rate, high = statistics.quantiles(rates, n=4)
        before, after = (sum(tree.rates) for tree in trees)
        slower |= min(rate, after / before) < arguments.at_least
        print(
            f"{contender:10} rate {rate:.3f} (quartiles {low:.2f} to {high:.2f} of {len(rates)} "
            f"turns), in all {after / before:.3f}, processor time {statistics.median(cpu_s):.3f}",
            flush=True,
        )
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
