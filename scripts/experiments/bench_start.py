#!/usr/bin/env python3
"""How long a run takes to start, a killed module to be back, and a run to stop: a Markdown table.

    scripts/experiments/bench_start.py --data build/fashion-mnist --backends process,apptainer
    scripts/slurm-testbed run -- scripts/as-user -- build/venv/bin/python \\
        scripts/experiments/bench_start.py
    scripts/slurm-testbed run --cpus 24 -- scripts/as-user -- build/venv/bin/python \\
        scripts/experiments/bench_start.py --modules 64 --backends slurm --repetitions 1

*start*: from the command until every module has trained its first batch; of that *placed* until the
first worker is started (dnictl, images checked, Slurm's queue), *loaded* until the last worker
listens (Python, torch, its module), the rest until links stand and a batch has gone through.
Of one worker, the median of all: *launch* until its Python begins (Slurm's step, the container and
its image's mount), *import* of torch and the runtime, *load* of data, module and state, *connect*
until its links stand.
*restart*: from a SIGKILL of one module's worker until it trains on a batch that it had not had,
with ``restart.backoff_s`` of half a second. *up*, *down*: from ``dnictl scale`` until all workers
train with one replica of a module (``--modules``) more, and fewer. *stop*: from ``dnictl stop``
until the run has ended after its checkpoint. Every figure is the median of the repetitions, with
its range.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from dni_runtime.api.run import Run
from dni_runtime.measure.figures import MetricsReader
from dni_runtime.run.documents.metrics import StartLine, read_metrics
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.slurm import commands
from dni_runtime.spec.named import module_of
from dni_runtime.worker.ledger import Counts

ROOT = Path(__file__).resolve().parents[2]
DNICTL = (sys.executable, "-m", "dnictl")
BACKENDS = {
    "process": ("up", "-d", "--backend", "process"),
    "apptainer": ("up", "-d", "--backend", "apptainer"),
    "slurm": ("submit", "--backend", "process"),
    "slurm+apptainer": ("submit", "--backend", "apptainer"),
}
SETTLE_S = 3.0
POLL_S = 0.05
DEADLINE_S = 600.0
MIB = 1 << 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TIMES = ("start_s", "placed_s", "loaded_s", "restart_s", "up_s", "down_s", "stop_s")
PARTS = ("launch_s", "import_s", "load_s", "connect_s")
HEADINGS = (
    *("start (s)", "placed (s)", "loaded (s)", "restart (s)", "up (s)", "down (s)", "stop (s)"),
    *("a worker's launch (s)", "import (s)", "load (s)", "connect (s)"),
    *("a worker's RSS, PSS (MiB)", "all workers' CPU until they train (s)"),
)
FIGURES = (*TIMES, *PARTS, "rss_mib", "pss_mib", "cpu_s")


def main() -> None:
    options = parser().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    names = options.backends.split(",")
    if unknown := [name for name in names if name not in BACKENDS]:
        sys.exit(f"no backend {unknown[0]!r}: there are {', '.join(BACKENDS)}")
    chain = generated(options.modules) if options.modules else demo(options)
    if any("apptainer" in name for name in names):
        build(options.folder, chain)
    print(f"| backend | {' | '.join(HEADINGS)} |\n|{'---|' * (len(HEADINGS) + 1)}")
    for name in names:
        found = [measure(options, name, chain, number) for number in range(options.repetitions)]
        figures = {key: [one[key] for one in found if one.get(key) is not None] for key in FIGURES}
        memory = f"{shown(figures['rss_mib'], 0)}, {shown(figures['pss_mib'], 0)}"
        times = [shown(figures[key]) for key in (*TIMES, *PARTS)]
        cells = [*times, memory, shown(figures["cpu_s"])]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--backends", default=",".join(BACKENDS), help="default: %(default)s")
    p.add_argument("--repetitions", type=int, default=5)
    p.add_argument("--modules", type=int, help="a chain of so many small modules, not the demo's")
    p.add_argument("--data", type=Path, help="folder of Fashion-MNIST (default: it is fetched)")
    p.add_argument("--nodes", type=int, default=3, help="for Slurm (default: %(default)s)")
    p.add_argument("--interface", default="10.77.0.0/24", help="for Slurm (default: the testbed's)")
    p.add_argument("--folder", type=Path, default=ROOT / "build" / "start", help="%(default)s")
    return p


def demo(options: argparse.Namespace) -> dict[str, Any]:
    """The demo's chain, without an end."""
    data = options.data
    if data is None:
        fetch = [ROOT / "scripts" / "fetch-fashion-mnist", ROOT / "build" / "fashion-mnist"]
        fetched = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True)
        data = Path(fetched.stdout.splitlines()[-1])
    text = (ROOT / "definitions" / "chains" / "fashion-cdni.yaml").read_text()
    chain: dict[str, Any] = yaml.safe_load(text)
    chain["data"]["path"] = str(data.absolute())
    return chain | {"epochs": 1_000_000}


def generated(modules: int) -> dict[str, Any]:
    """A chain of many small modules: 64 units each, on scikit-learn's digits."""
    linear = {"Linear": {"in_features": 64, "out_features": 64}}
    layers = [linear, {"BatchNorm1d": {"num_features": 64}}, "ReLU"]
    top = [{"Linear": {"in_features": 64, "out_features": 10}}]
    last, elastic = modules - 1, modules // 2
    return {
        "name": f"digits-{modules}",
        "seed": 0,
        "data": {"dataset": "digits", "batch_size": 64, "flatten": True},
        "epochs": 1_000_000,
        "stop_grace_s": 120,  # the marker waits behind a window of batches at each link
        "defaults": {"optimizer": {"Adam": {"lr": 0.001}}, "resources": {"memory": "512M"}},
        "modules": [
            {"name": f"m{index:02d}", "layers": top if index == last else layers}
            | ({"replicas": {"start": 1, "most": 2}} if index == elastic else {})
            for index in range(modules)
        ],
    }


def write(folder: Path, name: str, chain: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(chain, sort_keys=False))
    return path


def build(folder: Path, chain: dict[str, Any]) -> None:
    """The chain's images, with the same torch as here if that is known."""
    index = Path(sys.prefix, "torch-index")
    if index.exists() and (url := index.read_text().strip()):
        chain["image"] = {"torch_index": url}
    command = [*DNICTL, "build", write(folder, "build", chain), "--out", folder / "images"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def measure(
    options: argparse.Namespace, name: str, chain: dict[str, Any], number: int
) -> dict[str, float | None]:
    """Start a run, kill a module, stop the run."""
    command = [*BACKENDS[name]]
    if name.startswith("slurm"):
        chain = chain | {"links": {**chain.get("links", {}), "interface": options.interface}}
        command += ["--nodes", str(options.nodes)]
    path = write(options.folder, name, chain)
    root = options.folder / "runs" / f"{name}-{number}-{time.strftime('%Y%m%d-%H%M%S')}"
    command += ["--run-dir", str(root), "--images", str(options.folder / "images")]
    began = time.time()
    subprocess.run([*DNICTL, command[0], path, *command[1:]], check=True, stdout=sys.stderr)
    record = Record.read(root)
    try:
        started = start_times(record, began)
        found = pids(record)
        cpu_s = sum(cpu_of(pid) for pid in {*found, *servers(found)})
        time.sleep(SETTLE_S)
        rss = [
            one.memory_bytes / MIB
            for one in MetricsReader(record).read().modules
            if one.memory_bytes
        ]
        pss = [pss_mib(pid) for pid in pids(record)]
        module = working(record)[len(record.modules) // 2 - 1]
        restart_s = restart_time_s(record, module)
        time.sleep(SETTLE_S)
        up_s = change_time_s(record, 2)
        time.sleep(SETTLE_S)
        down_s = change_time_s(record, 1)
        time.sleep(SETTLE_S)
    finally:
        asked = time.time()
        subprocess.run([*DNICTL, "stop", root], check=True, stdout=sys.stderr)
        stop_s = time.time() - asked
        job = JobRecord.load(record.run.job)
        if job is not None:
            until(lambda: not alive(job.job), "its job is gone")
    figures = started | {
        "restart_s": restart_s,
        "up_s": up_s,
        "down_s": down_s,
        "stop_s": stop_s,
        "cpu_s": cpu_s or None,
    }
    figures["rss_mib"] = statistics.median(rss) if rss else None
    figures["pss_mib"] = statistics.median(pss) if pss else None
    print(f"{name} {number + 1}/{options.repetitions}: {figures}", file=sys.stderr, flush=True)
    return figures


def start_times(record: Record, began: float) -> dict[str, float | None]:
    """When the first worker was started, the last listened, and all had trained a batch."""
    until(lambda: all_train(record), "every module trains", record)
    ended = time.time()
    events = Run(record).events()
    launched = {one.module: one.time for one in events if one.event == "worker_started"}
    listens = [record.run.endpoint(name).stat().st_mtime for name in working(record)[1:]]
    parts = [parts_of(record.run, name, launched[name]) for name in working(record)]
    return {
        "start_s": ended - began,
        "placed_s": min(launched.values()) - began,
        "loaded_s": max(listens) - began,
        **{key: statistics.median(one[key] for one in parts) for key in PARTS},
    }


def parts_of(run: RunDir, module: str, launched: float) -> dict[str, float]:
    """What a worker's start was made of."""
    line = next(read_metrics(run.metrics(module), StartLine))
    return {"launch_s": line.began - launched} | {key: getattr(line, key) for key in PARTS[1:]}


def working(record: Record) -> list[str]:
    """The workers that take part in this start, head first; none before it."""
    states = RunState.read(record.run).modules
    return [name for name in record.modules if name in states and states[name].state != "inactive"]


def all_train(record: Record) -> bool:
    """Whether each of these has trained on a batch in this start."""
    states = RunState.read(record.run).modules
    counts = {name: Counts.read(record.run.ledger(name)) for name in working(record)}
    return bool(counts) and all(
        own is not None and own.attempt == states[name].attempt and own.step
        for name, own in counts.items()
    )


def change_time_s(record: Record, replicas: int) -> float | None:
    """From ``dnictl scale`` until all train with so many; None if no module may change."""
    elastic = record.specs()[1][0].elastic
    if not elastic:
        return None
    (module,) = elastic
    began = time.time()
    before = {name: steps(record.run, name) for name in working(record)}
    subprocess.run(
        [*DNICTL, "scale", f"{module}={replicas}", record.run.root], check=True, stdout=sys.stderr
    )

    def goes_on() -> bool:
        names = working(record)
        fresh = [*map(module_of, names)].count(module) == replicas and all_train(record)
        return fresh and all(steps(record.run, name) > before.get(name, 0) for name in names)

    until(goes_on, f"all train, with {replicas} of {module}", record)
    return time.time() - began


def restart_time_s(record: Record, module: str) -> float:
    """From a module's SIGKILL until it trains on."""
    job = JobRecord.load(record.run.job)
    known = Report.read(record.run.worker(module))
    began = time.time()
    if job is None:
        pid = RunState.read(record.run).modules[module].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    else:
        commands.kill_steps([commands.step_ids(str(job.job))[module]])

    def again() -> bool:
        return Report.read(record.run.worker(module)).attempt != known.attempt

    until(again, f"{module} is restarted", record)
    before = steps(record.run, module)
    until(lambda: steps(record.run, module) > before, f"{module} trains again", record)
    return time.time() - began


def steps(run: RunDir, module: str) -> int:
    """Batches that a module has trained on, up to this moment."""
    return (Counts.read(run.ledger(module)) or Counts()).step


def alive(job: str | None) -> bool:
    info = commands.job_infos([str(job)]).get(str(job))
    return info is not None and (info.alive or info.completing)


def until(condition: Callable[[], bool], what: str, record: Record | None = None) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if record is not None and RunState.read(record.run).phase in ("failed", "stopped"):
            sys.exit(f"the run has ended: see 'dnictl logs {record.run.root}'")
        if time.monotonic() > end_s:
            sys.exit(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(POLL_S)


def pids(record: Record) -> list[int]:
    """The workers whose process ids count here: those that are not in a container."""
    found = []
    for name in record.modules:
        pid = Report.read(record.run.worker(name)).pid
        try:
            words = command_of(pid).split()
        except OSError:
            continue
        if pid and name.encode() in words and str(record.run.root).encode() in words:
            found.append(pid)
    return found


def command_of(pid: int) -> bytes:
    """A process's command line, with spaces between its words."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")


def servers(pids: Iterable[int]) -> set[int]:
    """The processes that these are forks of."""
    parents = {int(stat_of(pid)[1]) for pid in pids}
    return {pid for pid in parents if b"dni_runtime.schedulers.forkserver" in command_of(pid)}


def stat_of(pid: int) -> list[str]:
    """Fields 3 and up of proc(5)'s stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_of(pid: int) -> float:
    """Processor seconds of a process."""
    return sum(map(int, stat_of(pid)[11:13])) / TICKS_PER_S


def pss_mib(pid: int) -> float:
    """Memory of a process, what is shared divided among its users (proc(5), smaps_rollup)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.split("\nPss:")[1].split()[0]) / 1024


def shown(values: Iterable[float], digits: int = 1) -> str:
    """Median and range."""
    known = sorted(values)
    if not known:
        return "-"
    middle = f"{statistics.median(known):.{digits}f}"
    if len(known) == 1:
        return middle
    return f"{middle} ({known[0]:.{digits}f}-{known[-1]:.{digits}f})"


if __name__ == "__main__":
    main()
