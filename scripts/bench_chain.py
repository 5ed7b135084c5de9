#!/usr/bin/env python3
"""Training throughput of a two-module chain beside its synchronous peers, measured in one run.

The network is an MLP 784-1024-1024-1024-1024-10 with BatchNorm and ReLU, batch 256, fused Adam,
cross entropy, on random images of Fashion-MNIST's shape that lie in memory. Everybody reads them
through ``dni_runtime.data``, and has one thread per process unless its name says otherwise:

* ``single-1``, ``single-2``: one process, plain backprop, 1 or 2 threads;
* ``ddp``: two processes with half a batch each (torch.nn.parallel.DistributedDataParallel, gloo);
* ``gpipe-M``, ``1f1b-M``, ``interleaved-M``, ``zbv-M`` …: torch.distributed.pipelining's schedules
  on two processes with M micro-batches (gloo);
* ``chain``: two modules through ``dnictl up --backend process``, synthetic gradients.

Each repetition runs each contender once, from a different start in the list, so that a change in
the machine's load meets all of them; ratios are taken within a repetition. Rates are those of the
steady state: start and warm-up are left out, and of the chain its last report too. The cores that
other programs kept busy meanwhile are shown beside each rate: near 0 on a machine of one's own.

One file, because it starts itself as its peers' processes.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

WIDTH = 1024
BATCH = 256
LEARNING_RATE = 1e-3
SAMPLES = 60_000
PROCESS_LIMIT_S = 240
GUESSED_RATE = 6000.0
"""Samples/s by which the length of the chain's run is chosen before anything is measured."""
QUIET_TRIES = 4

# name -> class in torch.distributed.pipelining, stages per process, micro-batches
SCHEDULES: dict[str, tuple[str, int, int]] = {
    f"{name}-{count}": (cls, stages, count)
    for name, cls, stages, counts in (
        ("gpipe", "ScheduleGPipe", 1, (1, 2, 4)),
        ("1f1b", "Schedule1F1B", 1, (2, 4)),
        ("bfs", "ScheduleLoopedBFS", 2, (2, 4)),
        ("interleaved", "ScheduleInterleaved1F1B", 2, (2, 4)),
        ("izb", "ScheduleInterleavedZeroBubble", 2, (2, 4)),
        ("zbv", "ScheduleZBVZeroBubble", 2, (2, 4)),
        ("dualpipev", "ScheduleDualPipeV", 2, (4,)),
    )
    for count in counts
}
V_SHAPED = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
SINGLE = {"single-1": 1, "single-2": 2}
CHAIN = "chain"
CONTENDERS = (*SINGLE, "ddp", *SCHEDULES, CHAIN)
BASE = "single-2"


def network() -> list[tuple[str, dict[str, int]]]:
    """The layers, as names and keywords of torch.nn."""
    layers: list[tuple[str, dict[str, int]]] = []
    for inputs in (784, WIDTH, WIDTH, WIDTH):
        layers.append(("Linear", {"in_features": inputs, "out_features": WIDTH}))
        layers.append(("BatchNorm1d", {"num_features": WIDTH}))
        layers.append(("ReLU", {}))
    layers.append(("Linear", {"in_features": WIDTH, "out_features": 10}))
    return layers


LAYERS = len(network())


Key = tuple[str, int]
"""A contender's name and how many layers its first process has (0: not cut, or cut in four)."""


@dataclass(frozen=True)
class Settings:
    """What all contenders have in common.

    Attributes:
        folder: Where the data and the runs lie.
        warmup_s: Seconds of training before timing starts.
        seconds: Seconds of training that are timed.
        peer_split: Layers on the first process of a schedule with one stage each.
        chain_split: Layers in the chain's first module.
        learn_every: Of how many late gradients the synthesizer learns from one.
    """

    folder: Path
    warmup_s: float
    seconds: float
    peer_split: int
    chain_split: int
    learn_every: int


@dataclass
class Outcome:
    """What one contender reached.

    Attributes:
        rates: Samples/s, one for each repetition; None where it failed.
        foreign: Cores that other programs kept busy meanwhile.
        error: Why it failed, or None.
    """

    rates: list[float | None] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def measured(self) -> list[float]:
        return [rate for rate in self.rates if rate is not None]


# One process of a peer: these functions run in it, and print one JSON object.


def build(layers: Sequence[tuple[str, dict[str, int]]]) -> Any:
    from torch import nn

    return nn.Sequential(*(getattr(nn, name)(**arguments) for name, arguments in layers))


def adam(module: Any) -> Any:
    import torch

    return torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, fused=True)


def batches(folder: Path, batch_size: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Epochs without end."""
    from dni_runtime.data import open_data
    from dni_runtime.spec import DataSpec

    spec = DataSpec.model_validate(
        {**data_spec(folder), "batch_size": batch_size, "drop_last": True}
    )
    source = open_data(spec, folder, seed=seed)
    epoch = 0
    while True:
        yield from source.train_batches(epoch)
        epoch += 1


def timed(step: Callable[[], None], settings: Settings, agree: Callable[[int], int]) -> float:
    """Samples/s of ``step`` after a warm-up; ``agree`` makes all processes take as many steps."""

    def repeat(steps: int) -> float:
        """Seconds for one step."""
        started = time.perf_counter()
        for _ in range(steps):
            step()
        agree(0)  # all have finished
        return (time.perf_counter() - started) / steps

    repeat(2)
    step_s = repeat(5)
    for seconds in (settings.warmup_s, settings.seconds):
        step_s = repeat(agree(max(20, int(seconds / step_s))))
    return BATCH / step_s


def run_single(settings: Settings) -> float:
    from torch import nn

    model, loss = build(network()), nn.CrossEntropyLoss()
    optimizer, source = adam(model), batches(settings.folder, BATCH, 0)

    def step() -> None:
        x, y = next(source)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return timed(step, settings, lambda steps: steps)


def join(rank: int, rendezvous: str) -> Callable[[int], int]:
    """Join the other process; gives a function by which both take the first one's number."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )

    def agree(number: int) -> int:
        shared = torch.tensor([number])
        dist.broadcast(shared, 0)
        dist.barrier()
        return int(shared)

    return agree


def run_ddp(settings: Settings, rank: int, rendezvous: str) -> float:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    agree = join(rank, rendezvous)
    model = DistributedDataParallel(build(network()), gradient_as_bucket_view=True)
    loss, optimizer = nn.CrossEntropyLoss(), adam(model)
    source = batches(settings.folder, BATCH // 2, rank)

    def step() -> None:
        x, y = next(source)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return timed(step, settings, agree)


def run_pipeline(name: str, settings: Settings, rank: int, rendezvous: str) -> float:
    import torch
    from torch import nn
    from torch.distributed import pipelining

    class_name, per_rank, micro_batches = SCHEDULES[name]
    schedule_class = getattr(
        importlib.import_module("torch.distributed.pipelining.schedules"), class_name
    )
    cuts = [0, settings.peer_split, LAYERS] if per_rank == 1 else [0, 3, 6, 9, LAYERS]
    count = len(cuts) - 1
    if per_rank == 1:
        mine = [rank]
    elif class_name in V_SHAPED:
        mine = [rank, count - 1 - rank]
    else:
        mine = [rank, rank + 2]
    agree = join(rank, rendezvous)
    device = torch.device("cpu")
    modules = [build(network()[cuts[i] : cuts[i + 1]]) for i in mine]
    stages = [
        pipelining.PipelineStage(module, i, count, device)
        for module, i in zip(modules, mine, strict=True)
    ]
    schedule = schedule_class(
        stages[0] if per_rank == 1 else stages, micro_batches, loss_fn=nn.CrossEntropyLoss()
    )
    optimizer, source = adam(nn.ModuleList(modules)), batches(settings.folder, BATCH, 0)
    first, last = 0 in mine, count - 1 in mine

    def step() -> None:
        x, y = next(source)  # both read all: neither inputs nor labels need to travel
        optimizer.zero_grad()
        arguments = (x,) if first else ()
        if last:
            schedule.step(*arguments, target=y, losses=[])
        else:
            schedule.step(*arguments)
        optimizer.step()

    return timed(step, settings, agree)


def be_process(arguments: argparse.Namespace, settings: Settings) -> None:
    """What a started process does."""
    import torch

    name: str = arguments.process
    torch.manual_seed(0)
    torch.set_num_threads(SINGLE.get(name, 1))
    if name in SINGLE:
        rate = run_single(settings)
    elif name == "ddp":
        rate = run_ddp(settings, arguments.rank, arguments.rendezvous)
    else:
        rate = run_pipeline(name, settings, arguments.rank, arguments.rendezvous)
    print(json.dumps({"rate": rate}), flush=True)
    # Both have finished timing; gloo's orderly end is not what is measured, and can take long.
    os._exit(0)


# The process that starts the others.


def environment(threads: int) -> dict[str, str]:
    """Threads pinned for OpenMP and MKL; gloo on loopback."""
    pinned = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)
    )
    return {**os.environ, **pinned, "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


def measure_peer(name: str, settings: Settings) -> float:
    """Start a contender's one or two processes and read the first one's rate."""
    with tempfile.TemporaryDirectory(dir=settings.folder) as scratch:
        command = [sys.executable, __file__, "--process", name, "--rendezvous", f"{scratch}/meet"]
        command += ["--settings", json.dumps({**asdict(settings), "folder": str(settings.folder)})]
        processes = []
        for rank in range(1 if name in SINGLE else 2):
            with (
                open(f"{scratch}/{rank}.out", "wb") as out,
                open(f"{scratch}/{rank}.err", "wb") as err,
            ):
                processes.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)],
                        stdout=out,
                        stderr=err,
                        env=environment(SINGLE.get(name, 1)),
                    )
                )
        deadline = time.monotonic() + PROCESS_LIMIT_S
        try:
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"did not end within {PROCESS_LIMIT_S} s")
                if any(process.poll() not in (None, 0) for process in processes):
                    time.sleep(1)  # the other's message may be the better one
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        text = Path(f"{scratch}/0.out").read_text()
        if not text.strip():
            errors = [Path(f"{scratch}/{rank}.err").read_text() for rank in range(len(processes))]
            raise RuntimeError(last_error("\n".join(errors)))
        return float(json.loads(text.strip().splitlines()[-1])["rate"])


def last_error(text: str) -> str:
    """The line that tells what happened, of a traceback or of what ``dnictl`` prints."""
    lines = [line for line in text.splitlines() if re.match(r"\S.*[eE]rror\b|\w*Error\b", line)]
    return (lines or text.splitlines() or ["no message"])[-1][:300]


def data_spec(folder: Path) -> dict[str, Any]:
    return {
        "dataset": "npz",
        "path": str(folder / "data.npz"),
        "batch_size": BATCH,
        "flatten": True,
    }


def chain_spec(settings: Settings, steps: int) -> dict[str, Any]:
    """The chain of two modules as a chain.yaml holds it."""
    layers = [{name: arguments} if arguments else name for name, arguments in network()]
    cut = settings.chain_split
    return {
        "name": "bench",
        "data": data_spec(settings.folder),
        "epochs": -(-steps * BATCH // SAMPLES) + 1,
        "steps": steps,
        "eval_every": 0,
        "checkpoint": {"every_epochs": 0},
        "defaults": {
            "interface": {
                "synthetic": {
                    "synthesizer": {"low-rank": {"rank": 64}},
                    "conditioned": True,
                    "learn_every": settings.learn_every,
                }
            },
            "optimizer": {"Adam": {"lr": LEARNING_RATE, "fused": True}},
            "cpus": 1,
        },
        "modules": [
            {"name": "head", "layers": layers[:cut]},
            {"name": "tail", "layers": layers[cut:]},
        ],
    }


def measure_chain(settings: Settings, rate: float) -> float:
    """Run the chain through ``dnictl`` and read its steady rate from the tail's metrics.

    Args:
        settings: What is to be run.
        rate: Samples/s that are expected, to choose the number of steps.
    """
    folder = Path(tempfile.mkdtemp(prefix="chain-", dir=settings.folder))
    steps = int((settings.warmup_s + settings.seconds + 2) * rate / BATCH)
    chain = folder / "chain.yaml"
    chain.write_text(json.dumps(chain_spec(settings, steps), indent=1))  # JSON is YAML
    run = folder / "run"
    command = [sys.executable, "-m", "dnictl", "up", str(chain), "--backend", "process"]
    command += ["--json", "--run-dir", str(run)]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment(1))
        try:
            code = process.wait(PROCESS_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise RuntimeError(f"dnictl up did not end within {PROCESS_LIMIT_S} s") from None
    if code != 0:
        message = (folder / "err").read_text().strip() or (folder / "out").read_text().strip()
        raise RuntimeError(f"dnictl up ended with {code}: {last_error(message)}")
    return steady_rate((run / "metrics" / "tail.jsonl").read_text(), settings.warmup_s)


def steady_rate(text: str, warmup_s: float) -> float:
    """Samples/s between the first report after the warm-up and the last but one.

    The warm-up is at least 64 batches, more than the window and the kernel's buffers hold.
    """
    lines = [json.loads(line) for line in text.splitlines()]
    reports = [(line["time"], line["samples"]) for line in lines if line.get("kind") == "train"]
    if reports:
        time_s, samples = reports[0]
        reports = [
            r for r in reports[:-1] if r[0] >= time_s + warmup_s and r[1] >= samples + 64 * BATCH
        ]
    if len(reports) < 2 or reports[-1][1] == reports[0][1]:
        raise RuntimeError(f"only {len(reports)} reports of the tail after the warm-up")
    return float((reports[-1][1] - reports[0][1]) / (reports[-1][0] - reports[0][0]))


def write_data(folder: Path) -> None:
    """Random images of Fashion-MNIST's shape, type and number."""
    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (SAMPLES + BATCH, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, SAMPLES + BATCH, dtype=np.uint8)
    np.savez(
        folder / "data.npz",
        x_train=images[:SAMPLES],
        y_train=labels[:SAMPLES],
        x_eval=images[SAMPLES:],
        y_eval=labels[SAMPLES:],
    )


def measure_all(
    contenders: Sequence[tuple[str, Settings]], repetitions: int, quiet: float
) -> dict[Key, Outcome]:
    """All contenders in turn, as often as wanted; one that fails is not tried again.

    Args:
        contenders: Names and settings.
        repetitions: How often each is measured.
        quiet: Measure again, a few times at most, where others kept more than so many cores busy.
    """
    outcomes = {key(name, settings): Outcome() for name, settings in contenders}
    for repetition in range(repetitions):
        turn = repetition * len(contenders) // repetitions
        for name, settings in (*contenders[turn:], *contenders[:turn]):
            outcome = outcomes[key(name, settings)]
            if outcome.error is not None:
                outcome.rates.append(None)
                continue
            known = outcome.measured or [1.2 * r for o in outcomes.values() for r in o.measured]
            guess = max(known, default=GUESSED_RATE)
            try:
                rate, foreign = measure(name, settings, guess, quiet)
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                outcome.error = f"{type(error).__name__}: {error}"
                outcome.rates.append(None)
                progress(f"{repetition + 1}/{repetitions} {name}: {outcome.error}")
                continue
            outcome.rates.append(rate)
            outcome.foreign.append(foreign)
            progress(
                f"{repetition + 1}/{repetitions} {name}: {rate:.0f} samples/s "
                f"(others: {foreign:.2f} cores)"
            )
    return outcomes


def measure(name: str, settings: Settings, guess: float, quiet: float) -> tuple[float, float]:
    """A contender's samples/s, and the cores that others kept busy meanwhile."""
    best: tuple[float, float] | None = None
    for _ in range(QUIET_TRIES):
        wait_until_quiet(quiet)
        before = busy()
        rate = measure_chain(settings, guess) if name == CHAIN else measure_peer(name, settings)
        foreign = cores(before, busy())
        if best is None or foreign < best[1]:
            best = rate, foreign
        if foreign <= quiet:
            break
    assert best is not None
    return best


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


def key(name: str, settings: Settings) -> Key:
    """What a contender is told from others by."""
    if name == CHAIN:
        return name, settings.chain_split
    return name, settings.peer_split if name in SCHEDULES and SCHEDULES[name][1] == 1 else 0


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ratios(rates: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Quotients within each repetition."""
    return [a / b for a, b in zip(rates, base, strict=True) if a is not None and b is not None]


def best_schedule(outcomes: dict[Key, Outcome]) -> Key | None:
    """The pipelining schedule with the highest median."""
    medians = {
        at: statistics.median(outcome.measured)
        for at, outcome in outcomes.items()
        if at[0] in SCHEDULES and outcome.measured
    }
    return max(medians, key=lambda at: medians[at]) if medians else None


def facts() -> dict[str, Any]:
    """The machine and the software, as far as they bear on the figures."""
    import torch

    def line(path: str, start: str = "") -> str | None:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            return None
        return next(
            (text.removeprefix(start).lstrip("\t :") for text in lines if text.startswith(start)),
            None,
        )

    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": line("/proc/cpuinfo", "model name"),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mkl": torch.backends.mkl.is_available(),
        "tcp_congestion_control": line("/proc/sys/net/ipv4/tcp_congestion_control"),
        "tcp_slow_start_after_idle": line("/proc/sys/net/ipv4/tcp_slow_start_after_idle"),
    }


def report(outcomes: dict[Key, Outcome]) -> dict[str, Any]:
    """Medians, spreads and ratios of all contenders."""
    best = best_schedule(outcomes)
    base = outcomes.get((BASE, 0))
    rows = []
    for (name, split), outcome in outcomes.items():
        row: dict[str, Any] = {"name": name, "split": split or None, **asdict(outcome)}
        if outcome.measured:
            row["median"] = statistics.median(outcome.measured)
            if best is not None:
                row["over_best_pipelining"] = ratios(outcome.rates, outcomes[best].rates)
            if base is not None:
                row["over_single_2"] = ratios(outcome.rates, base.rates)
        rows.append(row)
    return {"best_pipelining": best, "contenders": rows}


def table(result: dict[str, Any]) -> str:
    """The report as text."""

    def paired(values: list[float] | None) -> str:
        if not values:
            return "-"
        return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

    best = result["best_pipelining"]
    lines = [" ".join(f"{name}={value}" for name, value in result["machine"].items()), ""]
    head = (
        "contender",
        "samples/s",
        "spread",
        f"/ {best[0] if best else 'pipelining'}",
        f"/ {BASE}",
        "others' cores",
    )
    rows = [head]
    for row in result["contenders"]:
        name = row["name"] + (f" @{row['split']}" if row["split"] else "")
        if "median" not in row:
            rows.append((name, "failed", row["error"], "", "", ""))
            continue
        rates = [rate for rate in row["rates"] if rate is not None]
        rows.append(
            (
                name,
                f"{row['median']:.0f}",
                f"{min(rates):.0f}-{max(rates):.0f}",
                paired(row.get("over_best_pipelining")),
                paired(row.get("over_single_2")),
                f"{statistics.median(row['foreign']):.2f}",
            )
        )
    for row in rows:
        lines.append(
            f"{row[0]:18} {row[1]:>9}  {row[2]:12} {row[3]:18} {row[4]:18} {row[5]}".rstrip()
        )
    lines += [
        "",
        "@N: layers in the first of two processes. Ratios: medians of those within a repetition.",
    ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="timed, for each contender")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before that")
    parser.add_argument(
        "--only", default="*", help=f"patterns of names, with commas, of: {', '.join(CONTENDERS)}"
    )
    parser.add_argument(
        "--peer-split",
        default="6",
        help=f"layers in a schedule's first process, of {LAYERS}; several with commas are compared",
    )
    parser.add_argument("--chain-split", default="6", help="the same for the chain's first module")
    parser.add_argument(
        "--quiet",
        type=float,
        default=float("inf"),
        metavar="CORES",
        help="on a shared machine: wait for, and measure again without, more foreign load",
    )
    parser.add_argument("--learn-every", type=int, default=4, help="see the synthetic interface")
    parser.add_argument(
        "--folder", type=Path, help="keep the data and the chains' runs here (default: nowhere)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for hidden, kind in (("process", str), ("rank", int), ("rendezvous", str), ("settings", str)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    arguments = parse()
    if arguments.process is not None:
        raw = json.loads(arguments.settings)
        be_process(arguments, Settings(**{**raw, "folder": Path(raw["folder"])}))
    patterns = arguments.only.split(",")
    names = [n for n in CONTENDERS if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    if not names:
        progress(f"--only {arguments.only}: no such contender; there are {', '.join(CONTENDERS)}")
        return 64
    peer_splits, chain_splits = (
        [int(split) for split in text.split(",")]
        for text in (arguments.peer_split, arguments.chain_split)
    )
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dni-bench-"))
        )
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder)
        contenders: dict[Key, tuple[str, Settings]] = {}
        for name in names:
            for split in chain_splits if name == CHAIN else peer_splits:
                settings = Settings(
                    folder=folder,
                    warmup_s=arguments.warmup,
                    seconds=arguments.seconds,
                    peer_split=split,
                    chain_split=split,
                    learn_every=arguments.learn_every,
                )
                contenders.setdefault(key(name, settings), (name, settings))
        machine = facts()
        outcomes = measure_all(list(contenders.values()), arguments.repetitions, arguments.quiet)
    result = {"machine": machine, **report(outcomes)}
    print(json.dumps(result, indent=1) if arguments.json else table(result))
    return 0 if any(outcome.measured for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
