"""The synchronous contenders: backprop in one process, DDP, and pipelining schedules.

Started as a program this module is one of their processes, and prints one JSON object.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a program's folder comes first in sys.path, and this is a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from peers.networks import LEARNING_RATE, NETWORKS, Layer, Network, data_spec
from peers.slow_link import INTERFACE, Link

PROCESS_LIMIT_S = 300
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

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


@dataclass(frozen=True)
class Timing:
    """How long everybody trains.

    Attributes:
        warmup_s: Seconds of training before timing starts.
        seconds: Seconds of training that are timed.
    """

    warmup_s: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What one run of one contender gave.

    Attributes:
        rate: Samples/s.
        cpu_s: CPU seconds of all its processes for one sample.
        cores: Cores that each of its processes kept busy.
        details: What else is known.
    """

    rate: float
    cpu_s: float
    cores: tuple[float, ...]
    details: dict[str, Any]


def measure_synchronous(
    name: str, network: str, folder: Path, timing: Timing, cut: int | None, link: Link | None
) -> Measured:
    """Start a contender's one or two processes, and read what they print.

    Args:
        name: The contender.
        network: Name of the network.
        folder: Where the data lies.
        timing: How long.
        cut: Layers in the first of two processes, for schedules with one stage in each.
        link: The line between two processes; None for loopback.

    Raises:
        RuntimeError: A process failed.
    """
    ranks = 1 if name in SINGLE else 2
    threads = SINGLE.get(name, 1)
    environment = {
        **os.environ,
        **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
        "GLOO_SOCKET_IFNAME": "lo" if link is None else INTERFACE,
        "PYTHONUNBUFFERED": "1",
    }
    job = {"name": name, "network": network, "folder": str(folder), "cut": cut, **asdict(timing)}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        processes = []
        for rank in range(ranks):
            text = json.dumps({**job, "rank": rank, "rendezvous": f"{scratch}/meet"})
            command = [sys.executable, __file__, text]
            with (
                open(f"{scratch}/{rank}.out", "wb") as out,
                open(f"{scratch}/{rank}.err", "wb") as err,
            ):
                processes.append(
                    subprocess.Popen(
                        [*(link.enter(rank) if link is not None and ranks == 2 else []), *command],
                        stdout=out,
                        stderr=err,
                        env=environment,
                    )
                )
        _wait(processes, Path(scratch))
        answers = [json.loads(Path(f"{scratch}/{rank}.out").read_text()) for rank in range(ranks)]
    seconds = max(answer["seconds"] for answer in answers)
    samples = answers[0]["samples"]
    return Measured(
        rate=samples / seconds,
        cpu_s=sum(answer["cpu_s"] for answer in answers) / samples,
        cores=tuple(answer["cpu_s"] / answer["seconds"] for answer in answers),
        details={},
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], scratch: Path) -> None:
    deadline = time.monotonic() + PROCESS_LIMIT_S
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"did not end within {PROCESS_LIMIT_S} s")
            if any(process.poll() for process in processes):
                time.sleep(1)  # the other one's message may be the better one
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        messages = [last_error((scratch / f"{r}.err").read_text()) for r in range(len(codes))]
        raise RuntimeError("; ".join(f"rank {r}: {m}" for r, m in enumerate(messages) if m))


def last_error(text: str) -> str:
    """The line of a traceback that names the error, or the last one; none of no text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (named or lines or [""])[-1][:300]


# What the started processes do.


def build(layers: Sequence[Layer]) -> Any:
    from torch import nn

    return nn.Sequential(*(getattr(nn, name)(**arguments) for name, arguments in layers))


def adam(module: Any) -> Any:
    import torch

    return torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, fused=True)


def batches(network: Network, folder: Path, size: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Epochs without end."""
    from dni_runtime.data import open_data
    from dni_runtime.spec import DataSpec

    spec = {**data_spec(network, folder), "batch_size": size, "drop_last": True}
    source = open_data(DataSpec.model_validate(spec), folder, seed=seed)
    epoch = 0
    while True:
        yield from source.train_batches(epoch)
        epoch += 1


def timed(
    step: Callable[[], None], timing: Timing, batch: int, agree: Callable[[int], int]
) -> dict[str, float]:
    """Time ``step`` after a warm-up; ``agree`` makes all processes take as many steps.

    No barrier is timed: each process says how long its own steps took.
    """

    def repeat(steps: int) -> tuple[float, float]:
        """Seconds and CPU seconds."""
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return time.perf_counter() - started, time.process_time() - cpu

    repeat(2)
    step_s = repeat(5)[0] / 5
    steps, seconds, cpu_s = 0, 0.0, 0.0
    for wanted_s in (timing.warmup_s, timing.seconds):
        steps = agree(max(10, int(wanted_s / step_s)))
        seconds, cpu_s = repeat(steps)
        step_s = seconds / steps
    return {"samples": steps * batch, "seconds": seconds, "cpu_s": cpu_s}


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
        return int(shared)

    return agree


def run_whole(job: dict[str, Any], network: Network, timing: Timing) -> dict[str, float]:
    """Backprop in this process, or with DDP half of each batch."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model, size = build(network.layers), network.batch
    agree: Callable[[int], int] = lambda steps: steps  # noqa: E731
    if job["name"] not in SINGLE:
        agree = join(job["rank"], job["rendezvous"])
        model, size = DistributedDataParallel(model, gradient_as_bucket_view=True), size // 2
    loss, optimizer = nn.CrossEntropyLoss(), adam(model)
    source = batches(network, Path(job["folder"]), size, job["rank"])

    def step() -> None:
        x, y = next(source)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return timed(step, timing, network.batch, agree)


def run_pipeline(job: dict[str, Any], network: Network, timing: Timing) -> dict[str, float]:
    import torch
    from torch import nn
    from torch.distributed import pipelining

    class_name, per_rank, micro_batches = SCHEDULES[job["name"]]
    schedule_class = getattr(
        importlib.import_module("torch.distributed.pipelining.schedules"), class_name
    )
    rank, count = job["rank"], 2 * per_rank
    if per_rank == 1:
        mine = [rank]
    else:
        mine = [rank, count - 1 - rank] if class_name in V_SHAPED else [rank, rank + 2]
    agree = join(rank, job["rendezvous"])
    parts = network.parts(count, job["cut"])
    modules = [build(parts[i]) for i in mine]
    stages = [
        pipelining.PipelineStage(module, i, count, torch.device("cpu"))
        for module, i in zip(modules, mine, strict=True)
    ]
    schedule = schedule_class(
        stages[0] if per_rank == 1 else stages, micro_batches, loss_fn=nn.CrossEntropyLoss()
    )
    optimizer = adam(nn.ModuleList(modules))
    source = batches(network, Path(job["folder"]), network.batch, 0)
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

    return timed(step, timing, network.batch, agree)


def be_process(job: dict[str, Any]) -> None:
    """What a started process does."""
    import torch

    name = job["name"]
    torch.manual_seed(0)
    torch.set_num_threads(SINGLE.get(name, 1))
    network, timing = NETWORKS[job["network"]], Timing(job["warmup_s"], job["seconds"])
    run = run_pipeline if name in SCHEDULES else run_whole
    print(json.dumps(run(job, network, timing)), flush=True)
    if name not in SINGLE:
        # The other one may still be in its last step, which needs this one's gloo threads.
        import torch.distributed as dist

        with contextlib.suppress(RuntimeError):
            dist.barrier()
    # gloo's orderly end is not what is measured, and can take long.
    os._exit(0)


if __name__ == "__main__":
    be_process(json.loads(sys.argv[1]))
