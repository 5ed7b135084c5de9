"""What one of a peer's processes does: started as a program, it prints JSON lines.

Its argument is a JSON object (:func:`peers.processes.started` writes it). It either times a number
of steps, or trains without end and is evaluated at intervals.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a program's folder comes first in sys.path, and this is a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dni_runtime.core.dynamo import postpone_dynamo
from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.losses import ChainLoss
from dni_runtime.data import DataSource, open_data
from dni_runtime.spec import Choice, DataSpec, TensorSpec
from peers.asynchronous import AsynchronousPipeline
from peers.build import Trainer, adam, build_parts, output_shapes
from peers.contenders import SINGLE, in_flight, kind_of
from peers.networks import LEARNING_RATE, NETWORKS, Network
from peers.pipelines import Pipelined, owners
from peers.whole import Diloco, LocalSgd, Whole

_PATIENCE = timedelta(seconds=120)


def join(rank: int, processes: int, rendezvous: str) -> None:
    """Join the other processes."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=processes,
        timeout=_PATIENCE,
    )


def agree(number: int) -> int:
    """The first process's number, in all of them."""
    if not dist.is_initialized():
        return number
    shared = torch.tensor([number])
    dist.broadcast(shared, 0)
    return int(shared)


def make_trainer(job: dict[str, Any], network: Network) -> Trainer:
    """This process's part in a contender; the others have joined."""
    name, rank, processes, seed = job["name"], job["rank"], job["processes"], job["seed"]
    kind, number = kind_of(name)
    if kind == "pipeline":
        stages = owners(name, processes)
        mine = [stage for stage, owner in enumerate(stages) if owner == rank]
        parts = build_parts(network, len(stages), mine, cut=job["cut"], seed=seed)
        shapes = output_shapes(network, len(stages), job["cut"])
        optimizer = adam(nn.ModuleList(parts.values()))
        return Pipelined(name, network, parts, rank, processes, optimizer, shapes)
    if kind in ("2bw", "async-1f1b"):
        flying = in_flight(name, rank, processes)
        return AsynchronousPipeline(
            build_parts(network, processes, [rank], cut=job["cut"], seed=seed)[rank],
            adam,
            rank,
            output_shapes(network, processes, job["cut"]),
            network.batch,
            micro_batches=number if kind == "2bw" else 1,
            versions=2 if kind == "2bw" else flying,
            in_flight=flying,
        )
    model: nn.Module = build_parts(network, 1, [0], seed=seed)[0]
    if kind == "diloco":
        inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        return Diloco(model, inner, number, rank, processes)
    if kind == "local-sgd":
        return LocalSgd(model, adam(model), number, rank, processes)
    if kind in ("torchft-local-sgd", "torchft-diloco"):
        from peers.elastic import Torchft  # pip install --no-deps torchft, and what it imports

        return Torchft(model, adam(model), kind == "torchft-diloco", number, rank, processes)
    optimizer = adam(model)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Whole(model, optimizer, rank, processes)


def batches(source: DataSource, reads: bool) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Epochs without end; nothing for a process that does not read."""
    epoch = 0
    while True:
        epoch += 1
        if reads:
            yield from source.train_batches(epoch)
        else:
            yield None, None


def timed(
    step: Callable[[], None], warmup_s: float, wanted_s: float, period: int = 1
) -> dict[str, float]:
    """Time ``step`` for about ``wanted_s`` after a warm-up; all processes take as many steps.

    Their number is a multiple of ``period``. No barrier is timed: each process says how long its
    own steps took.
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
    for part_s in (warmup_s, wanted_s):
        steps = whole_periods(agree(max(10, int(part_s / step_s))), period)
        seconds, cpu_s = repeat(steps)
        step_s = seconds / steps
    return {"steps": steps, "seconds": seconds, "cpu_s": cpu_s}


def whole_periods(steps: int, period: int) -> int:
    """A multiple of a period, at least so many steps."""
    return -(-steps // period) * period


def train(
    trainer: Trainer, step: Callable[[], None], source: DataSource, network: Network, every: int
) -> None:
    """Train without end; print a line after each evaluation.

    The clock runs while this process trains, not while it evaluates. What the process that has the
    network's output prints is what counts. ``every`` (batches between evaluations) is rounded up to
    when the network is whole.
    """
    prediction = TensorSpec(shape=output_shapes(network, 1)[0], dtype="float32")
    loss = ChainLoss(Choice(name="CrossEntropyLoss"), prediction, source.info.label)
    interval = whole_periods(every, trainer.period)
    done, train_s = 0, 0.0
    agree(0)
    while True:
        began = time.perf_counter()
        for _ in range(interval):
            step()
        train_s += time.perf_counter() - began
        done += interval
        evaluation = EvaluationSums(loss, [Choice(name=network.metric)])
        for x_BX, y_BY in source.eval_batches():
            p_BP = trainer.predict(x_BX)
            if p_BP is not None:
                evaluation.add(p_BP, y_BY)
        if evaluation.samples:
            line = {"batches": done, "train_s": train_s, **evaluation.result()}
            print(json.dumps(line), flush=True)


def be_process(job: dict[str, Any]) -> None:
    """What a started process does."""
    torch.set_num_threads(SINGLE.get(job["name"], 1))
    network = NETWORKS[job["network"]]
    if job["processes"] > 1:
        join(job["rank"], job["processes"], job["rendezvous"])
    trainer = make_trainer(job, network)
    source = open_data(
        DataSpec.model_validate({**job["data"], "drop_last": True}),
        Path(job["folder"]),
        seed=job["seed"],
    )
    coming = batches(source, trainer.reads)

    def step() -> None:
        trainer.step(*next(coming))

    if job["every"] is not None:
        train(trainer, step, source, network, job["every"])
    found = timed(step, job["warmup_s"], job["seconds"], trainer.period)
    print(json.dumps(found), flush=True)
    if job["processes"] > 1:
        # Another one may still be in its last step, which needs this one's gloo threads.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    # gloo's orderly end is not what is measured, and can take long.
    os._exit(0)


if __name__ == "__main__":
    postpone_dynamo()
    be_process(json.loads(sys.argv[1]))
