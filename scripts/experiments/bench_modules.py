#!/usr/bin/env python3
"""What a long chain costs in the file system: operations per module, from the start to the end.

The chain is a real one: the supervisor, workers with ZeroMQ links over ipc, checkpoints, metrics.
Only the workers are threads of a few processes, so that a thousand of them fit on one machine. They
are started one after the other, as many at a time as there are processes, as if each had a core of
its own.

What is counted, in the supervisor and in all workers, below the run directory: files opened and
folders listed, made, renamed and removed (Python's audit events ``open``, ``os.listdir``,
``os.scandir``, ``os.mkdir``, ``os.rename``, ``os.remove``, ``os.rmdir``, ``os.link``) and calls of
``os.stat`` and ``os.lstat``; the entries of folders that were listed are counted apart. Reading,
writing and syncing a file that is open are not counted.

What is done again every second (the workers' reports, their metrics, the supervisor's look at them)
grows with time: it is given per module and second. The rest is given per module. Reports and
metrics are written every ten seconds here: those of a thousand modules would be most of what two
cores do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench_growth import chain_spec as growing

from dni_runtime.api.planning import plan_run
from dni_runtime.core.dynamo import postpone_dynamo
from dni_runtime.errors import DniError
from dni_runtime.files import write_json
from dni_runtime.plan.plan import WorkerPlan
from dni_runtime.plan.prepare import prepare
from dni_runtime.plan.settings import StartSettings
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import FOLDERS
from dni_runtime.schedulers.processes import Process
from dni_runtime.schedulers.runtimes import worker_argv
from dni_runtime.spec import ChainSpec
from dni_runtime.supervise.supervisor import Supervisor
from dni_runtime.worker import main as worker
from dni_runtime.worker import metrics
from dni_runtime.worker.ledger import Counts
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import WorkerStart
from dni_runtime.worker.start import parser as worker_parser

PERIODIC = (
    "workers",
    "control",  # read twice a second
    "metrics",
    "snapshots",
    "state.json",
    "events.jsonl",
    "stop.json",
    "requests",
)
"""What is read or written again and again, by the first part of its path in the run directory."""

EVENTS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
EVENTS |= {"os.link"}


class Operations:
    """Counts this process's operations on files below one folder.

    ``counts`` has them by the first part of the path below it; ``entries`` are those of folders
    that were listed.
    """

    def __init__(self, root: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.entries = 0
        self._root = f"{root}/"
        self._lock = threading.Lock()
        self._listdir, self._scandir = os.listdir, os.scandir
        replaced: Any = os  # pathlib finds them there
        replaced.stat, replaced.lstat = self._counting(os.stat), self._counting(os.lstat)
        replaced.listdir, replaced.scandir = self._list, self._scan
        sys.addaudithook(self._heard)

    def _below(self, path: object) -> str | None:
        """The first part of the path below the folder, if it is there."""
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if not f"{text!s}/".startswith(self._root):
            return None
        part = str(text)[len(self._root) :].partition("/")[0]
        if part.startswith("."):  # the temporary name of a file that is to appear whole
            part = ".".join(part.split(".")[1:3])
        return part if part in (*FOLDERS, *PERIODIC) else "others"

    def _count(self, path: object) -> None:
        part = self._below(path)
        if part is not None:
            with self._lock:
                self.counts[part] += 1

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            self._count(arguments[0])

    def _counting(self, call: Any) -> Any:
        def counted(path: Any, *arguments: Any, **keywords: Any) -> Any:
            self._count(path)
            return call(path, *arguments, **keywords)

        return counted

    def _list(self, path: Any = ".") -> list[Any]:
        found = self._listdir(path)
        if self._below(path) is not None:
            with self._lock:
                self.entries += len(found)
        return found

    def _scan(self, path: Any = ".") -> Any:
        part = self._below(path)
        if part is not None:
            with self._scandir(path) as found:
                entries = sum(1 for _ in found)
            with self._lock:
                self.entries += entries
                self.counts[part] -= 1  # the look that was taken here
        return self._scandir(path)


class ThreadedWorker:
    """A worker that is a thread of another process, as a supervisor sees it."""

    def __init__(self, pool: WorkerPool, module: str) -> None:
        self._pool = pool
        self._module = module

    @property
    def pid(self) -> int:
        return self._pool.pid

    def poll(self) -> int | None:
        return self._pool.ended.get(self._module)

    def kill(self) -> None:
        self._pool.kill()


class WorkerPool:
    """A process whose threads are workers.

    ``loading`` is released whenever a worker has come to its state and its address; ``ended`` has
    the exit codes of modules whose workers have ended.
    """

    def __init__(self, run: Path, loading: threading.Semaphore) -> None:
        self._loading = loading
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_pool, args=(theirs, run))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.ended: dict[str, int] = {}
        self._counted: tuple[Counter[str], int] | None = None
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def tell(self, what: str, *details: Any) -> None:
        """Have something done: ``start`` or ``finish``."""
        with contextlib.suppress(OSError):
            self._pipe.send((what, *details))

    def kill(self) -> None:
        """End all of its workers."""
        self._process.kill()

    def finish(self) -> tuple[Counter[str], int]:
        """End it; gives what it has counted."""
        self.tell("finish")
        self._listener.join()
        self._process.join()
        if self._counted is None:
            raise RuntimeError("a process of workers has died")
        return self._counted

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._counted is None:
                key, value = self._pipe.recv()
                if key is None:
                    self._counted = value
                elif value is None:
                    self._loading.release()
                else:
                    self.ended[key] = value


class ThreadStarter:
    """Starts workers as threads of some processes, in turn."""

    def __init__(self, pools: Sequence[WorkerPool], loading: threading.Semaphore) -> None:
        self._pools = itertools.cycle(pools)
        self._loading = loading
        self._waiting: queue.Queue[tuple[WorkerPool, WorkerPlan]] = queue.Queue()
        threading.Thread(target=self._start_in_turn, daemon=True).start()

    def start(self, worker: WorkerPlan) -> ThreadedWorker:
        pool = next(self._pools)
        self._waiting.put((pool, worker))
        return ThreadedWorker(pool, worker.module)

    def _start_in_turn(self) -> None:
        while True:
            pool, worker = self._waiting.get()
            self._loading.acquire()
            argv = worker_argv(worker)
            first = argv.index("dni_runtime.worker") + 1
            pool.tell("start", worker.module, argv[first:])

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        for process in workers.values():
            process.kill()


def serve_pool(pipe: Connection, run: Path) -> None:
    """What a process of workers does: starts threads, tells how they end, and counts."""
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGINT):  # the supervisor tells the workers
        signal.signal(number, signal.SIG_IGN)
    operations = Operations(run)
    loading: set[str] = set()
    lock = threading.Lock()

    def loaded(module: str) -> None:
        with lock:
            if module in loading:
                loading.discard(module)
                pipe.send((module, None))

    original = MetricsWriter.set_state

    def set_state(metrics: MetricsWriter, state: str, error: str | None = None) -> None:
        original(metrics, state, error)
        if state != "starting":
            loaded(metrics.spec.module)

    MetricsWriter.set_state = set_state  # type: ignore[method-assign]
    metrics.INTERVAL_S = 10.0

    def serve(module: str, arguments: Sequence[str]) -> None:
        given: dict[str, Any] = vars(worker_parser().parse_args(arguments))
        del given["selftest"]
        code = 0
        try:
            worker.serve(WorkerStart(**given), StopRequest(), time.time())
        except DniError as error:
            code = error.exit_code
            logging.error("%s: %s", module, error)
        except Exception:
            code = 70
            logging.exception("%s failed", module)
        loaded(module)
        with lock:
            pipe.send((module, code))

    while (message := pipe.recv())[0] != "finish":
        _, module, arguments = message
        loading.add(module)
        threading.Thread(target=serve, args=(module, arguments), daemon=True).start()
    with lock:
        pipe.send((None, (operations.counts, operations.entries)))


def chain_spec(modules: int, batches: int) -> ChainSpec:
    """A chain of equal small modules that trains so many batches, with four checkpoints."""
    written = growing(modules, batch=8).model_dump(mode="json", exclude_unset=True)
    return ChainSpec.model_validate(
        written
        | {
            "name": "modules",
            "steps": batches,
            "checkpoint": {"every_epochs": 0, "every_steps": max(batches // 4, 1)},
            "links": {"connect_timeout_s": 3600},
            "stop_grace_s": 600,
        }
    )


def measure(modules: int, batches: int, processes: int) -> dict[str, Any]:
    """Train a chain of so many modules, and count; once in a process, which counts from then on.

    ``start_s`` is from the start of the supervisor until all modules ran, ``total_s`` until the
    last one had ended. ``operations`` are those that are done once, per module, by the first part
    of the path; ``periodic`` per module and second; ``entries`` of folders that were listed.
    """
    with tempfile.TemporaryDirectory(prefix="dni-modules-") as folder:
        root = Path(folder) / "run"
        chain = Path(folder) / "chain.yaml"
        chain.write_text(chain_spec(modules, batches).model_dump_json(exclude_unset=True))
        prepared = prepare(chain)
        loading = threading.Semaphore(processes)
        pools = [WorkerPool(root, loading) for _ in range(processes)]
        operations = Operations(root)
        try:
            planned = plan_run(prepared, StartSettings(root, "process"))
            run, plan = planned.create(), planned.plan
            write_json(run.plan, plan.to_json())
            began, started_s = time.monotonic(), 0.0

            def observe(state: RunState) -> None:
                nonlocal started_s
                if state.phase == "running" and not started_s:
                    started_s = time.monotonic() - began

            state = Supervisor(run, plan, ThreadStarter(pools, loading)).run(observe)
            total_s = time.monotonic() - began
        finally:
            counted = [pool.finish() for pool in pools]
        done = {name: Counts.read(run.ledger(name)) for name in prepared.modules}
        steps = {None if one is None else one.step for one in done.values()}
        if state.phase != "finished" or steps != {batches}:
            raise RuntimeError(f"not trained to the end: {state.phase}, {state.error}")
        counts = sum((one for one, _ in counted), operations.counts)
        once = {k: round(v / modules, 2) for k, v in sorted(counts.items()) if k not in PERIODIC}
        return {
            "modules": modules,
            "batches": batches,
            "checkpoints": len(complete_cuts(run, prepared.modules)),
            "start_s": round(started_s, 1),
            "total_s": round(total_s, 1),
            "operations": once,
            "entries": round((operations.entries + sum(more for _, more in counted)) / modules, 1),
            "periodic": {k: round(counts[k] / modules / total_s, 2) for k in PERIODIC if counts[k]},
            "per_module": round(sum(once.values()), 1),
        }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", default="10,100,1000", help="lengths of the chains")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--processes", type=int, default=4, help="that the workers are threads of")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    logging.basicConfig(level="WARNING")
    torch.set_num_threads(1)
    postpone_dynamo()
    rows = []
    for modules in map(int, arguments.modules.split(",")):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as alone:
            given = (modules, arguments.batches, arguments.processes)
            rows.append(alone.submit(measure, *given).result())
        print(json.dumps(rows[-1]), flush=True)
    names = sorted(set().union(*(row["operations"] for row in rows)))
    print("\n| modules | operations per module | " + " | ".join(names), end=" ")
    print("| entries listed | start s | total s |\n" + "|---" * (len(names) + 5) + "|")
    for row in rows:
        parts = [row["operations"].get(name, 0) for name in names]
        first, last = ("modules", "per_module"), ("entries", "start_s", "total_s")
        cells = [*(row[key] for key in first), *parts, *(row[key] for key in last)]
        print("| " + " | ".join(map(str, cells)) + " |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
