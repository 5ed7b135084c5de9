#!/usr/bin/env python3
"""Let chains of real workers go through simulated disasters, one for each seed.

The own code of the supervisor and the workers runs, with its links, checkpoints, snapshots, counts
and restarts, in one process, against a simulated network, clock and disk (``tests/simulation``). A
seed decides about the chain, its surroundings, and what goes wrong: connections that are lost or
half open, messages that vanish, processes that stop or are killed, the supervisor among them, full
and slow disks, files that others see late, stop and resume; with ``--replicas`` also other numbers
of them that somebody asks for, and hosts that are lost.

What must hold: once faults have ended the run finishes; every module has counted every batch of
every epoch exactly once, all its replicas together, and none was trained on twice; ``exact`` is
backpropagation in every bit; checkpoints are whole, and the last one is there; evaluations have all
samples; queues are bounded; there are as many replicas as are wanted and have a host, and they
agree. A seed that fails is printed, and fails again::

    scripts/simulate.py --seeds 5000
    scripts/simulate.py --first 4711 --seeds 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["MKL_CBWR"] = "AUTO"  # frames begin anywhere in memory: round alike everywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CHUNK = 50
"""Schedules of one process: what a killed worker leaves behind goes with it."""


def memory_folder() -> Path:
    """Where files cost least."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def run_chunk(
    job: tuple[int, int, str, str | None, bool, bool],
) -> tuple[list[dict[str, Any]], int]:
    """Run some seeds; gives those that failed, and how often files were touched."""
    import torch

    from tests.simulation.mutations import MUTATIONS
    from tests.simulation.site import Schedule, Violated, simulate

    torch.set_num_threads(1)
    first, count, folder, without, graphs, replicas = job
    failed, operations = [], 0
    with MUTATIONS[without]() if without else contextlib.nullcontext():
        for seed in range(first, first + count):
            schedule = Schedule.of(seed, graph=graphs, replicas=replicas)
            try:
                operations += simulate(schedule, Path(folder)).disk.operations
            except Violated as error:
                failed.append({"seed": seed, "schedule": str(schedule), "violated": str(error)})
    return failed, operations


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds on all cores."""
    import torch._dynamo  # noqa: F401  # a first step needs it: children share what is here

    from tests.simulation.mutations import MUTATIONS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument(
        "--without", choices=list(MUTATIONS), help="leave a mend out: the simulation should find it"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="of up to eight modules, with joins and skips"
    )
    parser.add_argument("--replicas", action="store_true", help="of modules with replicas")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    failed: list[dict[str, Any]] = []
    operations = 0
    with tempfile.TemporaryDirectory(prefix="dni-simulation-", dir=memory_folder()) as folder:
        end = arguments.first + arguments.seeds
        jobs = [
            (
                *(first, min(CHUNK, end - first), folder),
                *(arguments.without, arguments.graphs, arguments.replicas),
            )
            for first in range(arguments.first, end, CHUNK)
        ]
        context = multiprocessing.get_context("fork")
        with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
            for found, touched in pool.imap_unordered(run_chunk, jobs):
                failed += found
                operations += touched
                if not arguments.json:
                    for one in found:
                        print(f"seed {one['seed']}: {one['violated']}\n  {one['schedule']}")
    took_s = time.perf_counter() - began
    rate = arguments.seeds / took_s
    if arguments.json:
        figures = {"schedules": arguments.seeds, "seconds": took_s, "failed": failed}
        print(json.dumps(figures | {"per_second": rate, "operations": operations}))
    else:
        print(f"{arguments.seeds} schedules, {len(failed)} failed, {rate:.1f} a second")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
