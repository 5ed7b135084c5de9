#!/usr/bin/env python3
"""Kills workers of a run at random, and tells what that has cost; or one worker, for a long outage.

    scripts/chaos.py kills --data build/fashion-mnist            # beside an undisturbed run
    scripts/chaos.py outage --data build/fashion-mnist --on-loss continue --replay 32
    scripts/chaos.py kills --data build/fashion-mnist --every 10 --seconds 300 --epochs 60 \\
        --replicas 2 --replication '{strategy: diloco}'
    scripts/slurm-testbed run -- scripts/as-user -- build/venv/bin/python scripts/chaos.py kills \\
        --nodes 3 --cuts 0.2 --backend apptainer --data build/fashion-mnist --seconds 3600

``kills``: a random worker gets SIGKILL every few seconds, for a while; then the run may end by
itself. With ``--nodes`` it is a Slurm job, and some of the kills are cuts of a host's network
instead, which end by themselves. ``outage``: one module in the middle is gone for some seconds; how
fast the others train meanwhile, as a share of their pace before.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from dni_runtime.api.run import Run
from dni_runtime.measure.figures import MetricsReader
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.metrics import EpochLine, TrainLine, read_metrics
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import RunState, process_birth
from dni_runtime.run.record import Record
from dni_runtime.schedulers.schedulers import read_state
from dni_runtime.schedulers.slurm import commands
from dni_runtime.spec.replicas import replicas_of

ROOT = Path(__file__).resolve().parents[1]
PAUSE = """\
import time
from torch import nn

class Pause(nn.Module):
    def forward(self, h):
        if self.training:
            time.sleep(%s)
        return h
"""
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
    p.add_argument("--interface", help="of all modules, instead of the chain's")
    p.add_argument("--pause", type=float, help="seconds that the head sleeps for each batch")
    p.add_argument("--nodes", type=int, help="submit to a Slurm of so many hosts")
    p.add_argument("--replicas", type=int, default=1, help="of each module (default: 1)")
    p.add_argument("--replication", default="{}", help="how they share: YAML, as in a chain file")
    p.add_argument("--cuts", type=float, default=0.0, help="share of cuts instead of kills")
    p.add_argument("--undisturbed", type=float, help="accuracy of an undisturbed run, if known")
    return p


def kills(options: argparse.Namespace) -> dict[str, Any]:
    """A run with kills, beside one without."""
    calm, same = options.undisturbed, None
    undisturbed = None if calm is not None else start(options, "calm")
    record = start(options, "kills")
    wait_until_all_train(record)
    choice, killed, cuts, use = random.Random(options.seed), [], 0, []
    until = time.monotonic() + options.seconds
    while time.monotonic() < until and read_state(record.run).active:
        if choice.random() < options.cuts:
            cuts += 1
            host, seconds = choice.randint(1, options.nodes), choice.randint(1, LONGEST_CUT_S)
            testbed = [ROOT / "scripts" / "slurm-testbed", "cut", str(host), str(seconds)]
            subprocess.run(testbed, check=True, stdout=sys.stderr)
        else:
            killed.append(kill(record, choice.choice(record.modules)))
        use.append(resources(record))
        time.sleep(options.every)
    began = time.monotonic()
    record = finish(record)
    took_s = time.monotonic() - began
    figures = MetricsReader(record).read()
    batches = {
        name: sum((counted(record, one) for one in own), Counter[int]())
        for name, own in replicas_of(record.modules).items()
    }
    due = dict.fromkeys(range(1, figures.epochs + 1), record.batches_per_epoch)
    if undisturbed is not None:
        calm = MetricsReader(finish(undisturbed)).read().accuracy
        same = weights(record) == weights(undisturbed)
    return {
        "state": figures.state,
        "cuts": cuts,
        "same_weights_as_undisturbed": same,
        "use_in_each_fifth": fifths(use),
        "kills": sum(name is not None for name in killed),
        "restarts": {one.module: one.restarts for one in figures.modules},
        "seconds_until_a_module_runs_again": median_s(restart_times_s(record)),
        "seconds_after_the_last_kill": round(took_s, 1),
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
    figures = MetricsReader(record).read()
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


LONGEST_CUT_S = 8
"""Shorter than Slurm gives a node up (``SlurmdTimeout``)."""

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
        longer = options.epochs / chain["epochs"]
        chain["epochs"] = options.epochs
        schedule = chain.get("defaults", {}).get("schedule", {}).get("MultiStepLR")
        if schedule is not None:  # else most of the training has the smallest rate
            schedule["milestones"] = [round(longer * one) for one in schedule["milestones"]]
    if options.interface is not None:
        for module in (chain.setdefault("defaults", {}), *chain["modules"]):
            module.pop("interface", None)
        chain["defaults"]["interface"] = options.interface
    if options.interface == "exact":
        chain.setdefault("checkpoint", {})["every_steps"] = 50
    if options.pause is not None:
        (options.folder / "pause.py").write_text(PAUSE % options.pause)
        chain["modules"][0]["layers"].append({"import": "pause:Pause"})
    if options.replicas > 1:
        chain["replication"] = yaml.safe_load(options.replication)
        for module in chain["modules"]:
            module["replicas"] = options.replicas
    if options.nodes is not None:
        chain["links"]["interface"] = "10.77.0.0/24"  # the testbed's
        for module in chain["modules"]:
            module.setdefault("resources", {})["memory"] = "1G"
    path = options.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(chain, sort_keys=False))
    root = options.folder / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    data = [] if options.data is None else ["--data", str(options.data)]
    where = ["--backend", options.backend, "--run-dir", str(root)]
    if options.backend == "apptainer":
        images = options.folder / "images"
        build = [*DNICTL, "build", str(path), "--out", str(images), *data]
        subprocess.run(build, check=True, stdout=sys.stderr)
        where += ["--images", str(images)]
    how = ["up", "-d"] if options.nodes is None else ["submit", f"--nodes={options.nodes}"]
    command = [*DNICTL, how[0], str(path), *how[1:], *where, *data]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Record.read(root)


def finish(record: Record) -> Record:
    """Wait until the run has ended by itself."""
    subprocess.run([*DNICTL, "wait", str(record.run.root)], check=False, stdout=sys.stderr)
    return record


def wait_until_all_train(record: Record) -> None:
    while not all(one.step for one in MetricsReader(record).read().modules):
        if not read_state(record.run).active:
            sys.exit("the run has ended")
        time.sleep(0.5)


def kill(record: Record, name: str) -> str | None:
    """Kill a module's worker, if there is one just now."""
    job = JobRecord.load(record.run.job)
    if job is not None and job.job is not None:
        step = commands.step_ids(job.job).get(name)
        if step is not None:
            commands.kill_steps([step])
        return None if step is None else name
    module = RunState.read(record.run).modules[name]
    if module.pid is None or process_birth(module.pid) != module.born:
        return None
    os.kill(module.pid, signal.SIGKILL)
    return name


def resources(record: Record) -> dict[str, float]:
    """What the run takes now: resident memory of its processes, and its directory, in MiB."""
    pids = {name: Report.read(record.run.worker(name)).pid for name in record.modules}
    supervisor = RunState.read(record.run).pid
    found: dict[str, float] = {}
    for name, pid in {**pids, "supervisor": supervisor}.items():
        with contextlib.suppress(OSError, TypeError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[name] = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    found["run directory"] = sum(
        size(Path(folder) / name) for folder, _, names in os.walk(record.run.root) for name in names
    ) / (1 << 20)
    found["files"] = sum(len(names) for _, _, names in os.walk(record.run.root))
    return found


def size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0


def fifths(use: list[dict[str, float]]) -> dict[str, list[int]]:
    """The largest of each figure in each fifth of the time."""
    names = sorted({name for one in use for name in one})
    cut = [use[len(use) * n // 5 : len(use) * (n + 1) // 5] for n in range(5)]
    return {name: [round(max((o.get(name, 0.0) for o in part), default=0)) for part in cut]
            for name in names}  # fmt: skip


def weights(record: Record) -> list[str]:
    """Sums of the layers' final tensors."""
    cut = complete_cuts(record.run, record.modules)[-1]
    sums = []
    for name in record.modules:
        part = record.run.checkpoint(cut, name)
        tensors = load_file(part.with_name(f"{name}.safetensors"))
        for key in sorted(tensors):
            if key.startswith("layers."):
                sums.append(hashlib.sha256(tensors[key].numpy().tobytes()).hexdigest())
    return sums


def counted(record: Record, name: str) -> Counter[int]:
    """Batches that a worker has acknowledged, by epoch."""
    lines = read_metrics(record.run.metrics(name), EpochLine)
    return Counter({line.epoch: line.batches for line in lines})


def restart_times_s(record: Record) -> list[float]:
    """From the end of a worker to the next one that runs, kills in between included."""
    ended: dict[str, float] = {}
    times = []
    for event in Run(record).events():
        if event.event == "worker_ended" and event.state == "failed":
            ended.setdefault(str(event.module), event.time)
        elif event.event == "worker_running" and event.module in ended:
            times.append(event.time - ended.pop(event.module))
    return times


def median_s(times_s: list[float]) -> float | None:
    return round(statistics.median(times_s), 1) if times_s else None


def pace(record: Record, name: str, since: float, until: float) -> float:
    """Samples a second of new batches, by the lines of metrics that lie in between."""
    lines = read_metrics(record.run.metrics(name), TrainLine)
    within = [line for line in lines if since <= line.time - line.interval_s / 2 < until]
    return sum((line.samples_per_s or 0) * line.interval_s for line in within) / (until - since)


if __name__ == "__main__":
    main()
