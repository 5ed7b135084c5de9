#!/usr/bin/env python3
"""What the runtime itself costs: CPU per batch beyond the module's own step, memory, idling, start.

Chains of 2 to 32 equal small modules (Linear 64 to 64, batch 32, a linear synthesizer that learns
from every true gradient), each module a process. Nothing here is a rate: CPU time is read from
/proc, so a busy machine changes the figures little. A worker's overhead per batch is its CPU time
less that of the same ModuleStep on the same batches without links, server and metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dni_runtime.core.step import ModuleStep
from dni_runtime.core.training import empty_batch
from dni_runtime.data import describe
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.documents.metrics import TrainLine, read_metrics
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, WorkerSpec

TICKS = os.sysconf("SC_CLK_TCK")
STARTED_WITHIN_S = 180.0


@dataclass(frozen=True)
class Growth:
    """One chain's figures."""

    modules: int
    batches_per_s: float  # of the whole chain, while it was watched
    worker_us: float  # CPU per batch, neither head nor tail (of two: the tail)
    step_us: float  # CPU per batch of the same step without a runtime
    overhead_us: float  # the difference
    share: float  # the difference over the worker's CPU
    start_s: float  # from the start of "dnictl up" until the last module runs
    rss_mib: float  # median of the workers' resident memory


def chain_spec(modules: int, width: int = 64, batch: int = 32, window: int = 8) -> ChainSpec:
    """A chain of equal modules that trains until it is stopped."""
    linear = {"Linear": {"in_features": width, "out_features": width}}
    first = {"Linear": {"in_features": 64, "out_features": width}}
    return ChainSpec.model_validate(
        {
            "name": "growth",
            "data": {"dataset": "digits", "flatten": True, "batch_size": batch, "drop_last": True},
            "epochs": 1_000_000,
            "eval_every": 0,
            "checkpoint": {"every_epochs": 0},
            "links": {"window": window},
            "defaults": {"interface": {"synthetic": {"synthesizer": "linear"}}},
            "modules": [
                {"name": f"m{index:02}", "layers": [linear if index else first, "ReLU"]}
                for index in range(modules)
            ],
        }
    )


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Running:
    """A chain that trains in processes of this host.

    ``pids`` are its workers', head first; ``start_s`` are the seconds until the last one ran.
    """

    def __init__(self, spec: ChainSpec, folder: Path) -> None:
        path = folder / "chain.yaml"
        path.write_text(spec.model_dump_json(exclude_unset=True))
        self.run = RunDir(folder / "run")
        self._names = [module.name for module in spec.modules]
        command = [sys.executable, "-m", "dnictl", "up", str(path), "--backend", "process"]
        began = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--run-dir", str(self.run.root)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not all(self._report(name).state == "running" for name in self._names):
            if self._process.poll() is not None or time.monotonic() - began > STARTED_WITHIN_S:
                self.stop()
                sys.exit(f"the chain of {len(self._names)} modules does not start")
            time.sleep(0.02)
        self.start_s = time.monotonic() - began
        self.pids = [self._report(name).pid or 0 for name in self._names]

    def _report(self, name: str) -> Report:
        return Report.read(self.run.worker(name))

    def batches(self, name: str, since: float, until: float) -> float:
        """Training batches that a module did between two points of Unix time, interpolated."""
        lines = read_metrics(self.run.metrics(name), TrainLine)
        points = [(line.time, line.step) for line in lines]

        def at(moment: float) -> float:
            for (t0, s0), (t1, s1) in itertools.pairwise(points):
                if t0 <= moment <= t1:
                    return float(s0 + (s1 - s0) * (moment - t0) / (t1 - t0))
            raise ValueError("no measurement around that time")

        return at(until) - at(since)

    def stop(self) -> None:
        """End it."""
        for pid in getattr(self, "pids", []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running(spec: ChainSpec) -> Iterator[Running]:
    """Start a chain and end it."""
    with tempfile.TemporaryDirectory(prefix="dni-growth-") as folder:
        chain = Running(spec, Path(folder))
        try:
            yield chain
        finally:
            chain.stop()


def step_alone_us(worker: WorkerSpec, batch: int, steps: int) -> float:
    """:func:`step_us` in as many processes as there are cores, busy as they are in a chain."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(
        cores,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        return statistics.median(
            pool.map(step_us, *(cores * [one] for one in (worker, batch, steps)))
        )


def step_us(worker: WorkerSpec, batch: int, count: int) -> float:
    """CPU per batch of a module's step alone: forward, update, learning from the late gradient."""
    step = ModuleStep(worker)
    x_BX = empty_batch(worker.inputs[0], batch, "cpu").uniform_()
    y_BY = empty_batch(worker.label, batch, "cpu")
    g_BH = empty_batch(worker.output, batch, "cpu").uniform_()
    began = 0.0
    for id in range(1, count + 101):
        if id == 101:
            began = time.process_time()
        step.forward(id, x_BX)
        step.update(y_BY)
        if worker.gradients_in:
            step.late_gradient(id, g_BH)
    return 1e6 * (time.process_time() - began) / count


def grow(modules: int, seconds: float, warmup_s: float, steps: int) -> Growth:
    """Measure a chain of so many modules."""
    spec = chain_spec(modules)
    workers = worker_specs(spec, describe(spec.data, Path()))
    with running(spec) as chain:
        time.sleep(warmup_s)
        since, before = time.time(), [cpu_s(pid) for pid in chain.pids]
        time.sleep(seconds)
        until, after = time.time(), [cpu_s(pid) for pid in chain.pids]
        memory = statistics.median(rss_mib(pid) for pid in chain.pids)
        time.sleep(2.5)  # the next measurement of each
        watched = range(1, modules - 1) if modules > 2 else range(1, 2)
        costs, rates = [], []
        for index in watched:
            batches = chain.batches(workers[index].module, since, until)
            costs.append(1e6 * (after[index] - before[index]) / batches)
            rates.append(batches / (until - since))
        start_s = chain.start_s
    worker_us = statistics.median(costs)
    alone_us = step_alone_us(workers[watched[0]], spec.data.batch_size, steps)
    overhead_us = worker_us - alone_us
    return Growth(
        modules,
        round(statistics.median(rates), 1),
        round(worker_us, 1),
        round(alone_us, 1),
        round(overhead_us, 1),
        round(overhead_us / worker_us, 3),
        round(start_s, 2),
        round(memory, 1),
    )


def idle_share(seconds: float, warmup_s: float) -> dict[str, float]:
    """Share of a core that workers use while the last module is halted and their windows fill."""
    with running(chain_spec(3)) as chain:
        time.sleep(warmup_s)
        os.kill(chain.pids[-1], signal.SIGSTOP)
        time.sleep(2)
        before = [cpu_s(pid) for pid in chain.pids]
        time.sleep(seconds)
        shares = [(cpu_s(pid) - b) / seconds for pid, b in zip(chain.pids, before, strict=True)]
    return {"head": round(shares[0], 4), "middle": round(shares[1], 4)}


def memory_by_window(windows: list[int], warmup_s: float) -> dict[int, list[float]]:
    """Resident memory (MiB) of head, middle and tail; activations of 1 MiB a batch."""
    found = {}
    for window in windows:
        with running(chain_spec(3, width=1024, batch=256, window=window)) as chain:
            time.sleep(warmup_s)
            os.kill(chain.pids[-1], signal.SIGSTOP)  # windows fill
            time.sleep(3)
            found[window] = [round(rss_mib(pid), 1) for pid in chain.pids]
    return found


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", default="2,4,8,16,32", help="lengths of the chains")
    parser.add_argument("--windows", default="2,8,32", help="windows for the memory's table")
    parser.add_argument("--seconds", type=float, default=10.0, help="watched, of each chain")
    parser.add_argument("--warmup", type=float, default=4.0, help="seconds before that")
    parser.add_argument("--steps", type=int, default=5000, help="timed, of a module alone")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| modules | batches/s | worker us/batch | step alone | overhead | share | start s | MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for modules in map(int, arguments.modules.split(",")):
        row = grow(modules, arguments.seconds, arguments.warmup, arguments.steps)
        rows.append(asdict(row))
        print("| " + " | ".join(str(value) for value in asdict(row).values()) + " |", flush=True)
    idle = idle_share(arguments.seconds, arguments.warmup)
    print(f"\nblocked by a halted tail, share of a core: {idle}")
    windows = [int(window) for window in arguments.windows.split(",")]
    memory = memory_by_window(windows, arguments.warmup)
    print("\n| window | head MiB | middle MiB | tail MiB |\n|---|---|---|---|")
    for window, values in memory.items():
        print(f"| {window} | " + " | ".join(map(str, values)) + " |")
    if arguments.json is not None:
        figures = {"growth": rows, "idle": idle, "memory_mib": memory}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
