#!/usr/bin/env python3
"""Kills workers of a run at random, and tells what that has cost; or one worker, for a long outage.

    scripts/chaos.py kills --data build/fashion-mnist            # beside an undisturbed run
    scripts/chaos.py outage --data build/fashion-mnist --on-loss continue --replay 32

``kills``: a random worker gets SIGKILL every few seconds, for a while; then the run may end by
itself. ``outage``: one module in the middle is gone for some seconds; how fast the others train
meanwhile, as a share of their pace before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from dni_runtime.launch.figures import Gauge
from dni_runtime.launch.records import Record
from dni_runtime.launch.state import RunState, process_birth
from dni_runtime.rundir import read_lines

ROOT = Path(__file__).resolve().parents[1]
SETTLED_S = 5.0
"""Paces are measured from so long after the start on, and this long after a kill."""


def main() -> None:
    options = parser().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    report = kills(options) if options.what == "kills" else outage(options)
    print(json.dumps(report, indent=2))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("what", choices=["kills", "outage"])
    p.add_argument("--chain", type=Path, default=ROOT / "definitions/chains/fashion-cdni.yaml")
    p.add_argument("--data", type=Path, help="folder or file of the data")
    p.add_argument("--folder", type=Path, default=ROOT / "build" / "chaos", help="%(default)s")
    p.add_argument("--epochs", type=int, help="instead of the chain's")
    p.add_argument("--backend", default="process", choices=["process", "apptainer"])
    p.add_argument("--seconds", type=float, default=60, help="how long (default: %(default)s)")
    p.add_argument("--every", type=float, default=5, help="seconds between kills (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the choice of workers")
    p.add_argument("--module", help="outage: who dies (default: the one in the middle)")
    p.add_argument("--on-loss", default="wait", choices=["wait", "continue"])
    p.add_argument("--replay", type=int, default=0)
    p.add_argument("--synthetic-inputs", choices=["gone", "late"])
    p.add_argument("--undisturbed", type=float, help="accuracy of an undisturbed run, if known")
    return p


def kills(options: argparse.Namespace) -> dict[str, Any]:
    """A run with kills, beside one without."""
    calm = options.undisturbed
    if calm is None:
        calm = Gauge(finish(start(options, "calm"))).read().accuracy
    record = start(options, "kills")
    wait_until_all_train(record)
    choice, killed = random.Random(options.seed), []
    until = time.monotonic() + options.seconds
    while time.monotonic() < until and RunState.read(record.run).active:
        killed.append(kill(record, choice.choice(record.modules)))
        time.sleep(options.every)
    began = time.monotonic()
    record = finish(record)
    figures = Gauge(record).read()
    batches = {name: counted(record, name) for name in record.modules}
    due = dict.fromkeys(range(1, figures.epochs + 1), record.batches_per_epoch)
    return {
        "state": figures.state,
        "kills": sum(name is not None for name in killed),
        "restarts": {one.module: one.restarts for one in figures.modules},
        "seconds_until_a_module_runs_again": median_s(restart_times_s(record)),
        "seconds_after_the_last_kill": round(time.monotonic() - began, 1),
        "accuracy": figures.accuracy,
        "accuracy_undisturbed": calm,
        "batches_per_epoch": record.batches_per_epoch,
        "all_batches_of_all_epochs_acknowledged": all(one == due for one in batches.values()),
        "acknowledged": {
            name: {"batches": sum(one.values()), "epochs": len(one)}
            for name, one in batches.items()
        },
        **{
            what: {one.module: getattr(one, what) for one in figures.modules}
            for what in ("missed", "replayed", "resent", "duplicates", "gaps")
        },
    }


def outage(options: argparse.Namespace) -> dict[str, Any]:
    """One module is gone for ``--seconds``; the paces of all before and meanwhile."""
    record = start(options, f"outage-{options.on_loss}-{options.replay}", away_s=options.seconds)
    wait_until_all_train(record)
    module = options.module or record.modules[len(record.modules) // 2]
    began = time.time() + SETTLED_S
    time.sleep(SETTLED_S + options.seconds)
    died = time.time()
    kill(record, module)
    time.sleep(options.seconds)
    back = time.time()
    subprocess.run([*DNICTL, "stop", str(record.run.root)], check=True, stdout=subprocess.DEVNULL)
    figures = Gauge(record).read()
    paces = {}
    for one in record.modules:
        before, meanwhile = pace(record, one, began, died), pace(record, one, died + 1, back)
        share = round(meanwhile / before, 3) if before else None
        paces[one] = {"before": round(before), "meanwhile": round(meanwhile), "share": share}
    return {
        "module": module,
        "on_loss": options.on_loss,
        "samples_per_s": paces,
        "missed": {one.module: one.missed for one in figures.modules},
        "replayed": {one.module: one.replayed for one in figures.modules},
    }


DNICTL = (sys.executable, "-m", "dnictl")


def start(options: argparse.Namespace, name: str, away_s: float | None = None) -> Record:
    """Start the chain in the background, with restarts that never give up."""
    chain = yaml.safe_load(options.chain.read_text())
    chain["restart"] = {"limit": 100_000, "backoff_s": 0.1, "backoff_max_s": 1, "snapshot_s": 1}
    if away_s is not None:
        chain["restart"] |= {"backoff_s": away_s, "backoff_max_s": away_s}
        chain["epochs"] = 100_000
    chain.setdefault("links", {}).update(
        on_loss=options.on_loss, replay=options.replay, synthetic_inputs=options.synthetic_inputs
    )
    if options.epochs is not None:
        chain["epochs"] = options.epochs
    path = options.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(chain, sort_keys=False))
    root = options.folder / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    data = [] if options.data is None else ["--data", str(options.data)]
    where = ["--backend", options.backend, "--run-dir", str(root)]
    command = [*DNICTL, "up", str(path), "-d", *where, *data]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Record.read(root)


def finish(record: Record) -> Record:
    """Wait until the run has ended by itself."""
    subprocess.run([*DNICTL, "wait", str(record.run.root)], check=False, stdout=sys.stderr)
    return record


def wait_until_all_train(record: Record) -> None:
    while not all(one.step for one in Gauge(record).read().modules):
        if not RunState.read(record.run).active:
            sys.exit("the run has ended")
        time.sleep(0.5)


def kill(record: Record, name: str) -> str | None:
    """Kill a module's worker, if there is one just now."""
    module = RunState.read(record.run).modules[name]
    if module.pid is None or process_birth(module.pid) != module.born:
        return None
    os.kill(module.pid, signal.SIGKILL)
    return name


def counted(record: Record, name: str) -> dict[int, int]:
    """Batches that a module has acknowledged, by epoch."""
    lines = read_lines(record.run.metrics(name))
    return {line["epoch"]: line["batches"] for line in lines if line["kind"] == "epoch"}


def restart_times_s(record: Record) -> list[float]:
    """From the end of a worker to the next one that runs, kills in between included."""
    ended: dict[str, float] = {}
    times = []
    for event in read_lines(record.run.events):
        if event["event"] == "worker_ended" and event["state"] == "failed":
            ended.setdefault(event["module"], event["time"])
        elif event["event"] == "worker_running" and event["module"] in ended:
            times.append(event["time"] - ended.pop(event["module"]))
    return times


def median_s(times_s: list[float]) -> float | None:
    return round(statistics.median(times_s), 1) if times_s else None


def pace(record: Record, name: str, since: float, until: float) -> float:
    """Samples a second of new batches, by the lines of metrics that lie in between."""
    lines = read_lines(record.run.metrics(name))
    within = [
        line
        for line in lines
        if line["kind"] == "train" and since <= line["time"] - line["interval_s"] / 2 < until
    ]
    return float(sum(line["samples_per_s"] * line["interval_s"] for line in within)) / (
        until - since
    )


if __name__ == "__main__":
    main()
