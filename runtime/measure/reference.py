"""Plain backpropagation of a chain's network in one process, with its own run directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dni_runtime.core.chain import Backprop
from dni_runtime.core.dynamo import postpone_dynamo
from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.layers import load_initial
from dni_runtime.data import DataSource, open_data
from dni_runtime.errors import WorkerError
from dni_runtime.files import append_line
from dni_runtime.plan.prepare import CheckedChain, importing_from
from dni_runtime.run.documents.metrics import EvaluationLine, MetricsLine, StartLine
from dni_runtime.run.lines import last_lines
from dni_runtime.run.record import Record
from dni_runtime.schedulers.processes import CHILD
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.worker.device import choose_device
from dni_runtime.worker.evaluations import Selection

REFERENCE = "backprop"


def default_threads(prepared: CheckedChain) -> int:
    """Return the threads of all workers together, but at most the number of cores."""
    return min(sum(worker.cpus for worker in prepared.workers), len(os.sched_getaffinity(0)))


def run_reference(record: Record, threads: int) -> None:
    """Train in a new process, which has its own number of threads."""
    command = [sys.executable, "-P", "-m", "dnictl", "reference", str(record.run.root)]
    log = record.run.log(REFERENCE, 1)
    with log.open("wb") as file:
        done = subprocess.run(
            [*CHILD, "tied", str(os.getpid()), *command, "--threads", str(threads)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    if done.returncode != 0:
        lines = "\n".join(f"  | {line}" for line in last_lines(log))
        raise WorkerError(f"plain backpropagation failed\n  log: {log}\n{lines}")


@contextmanager
def opened(
    record: Record, threads: int
) -> Iterator[tuple[ChainSpec, tuple[WorkerSpec, ...], Backprop, DataSource]]:
    """Open a run's chain, its workers' specs, their network in one piece, and the data."""
    torch.set_num_threads(threads)
    chain, workers = record.specs()
    with importing_from(record.run.sources):
        source = open_data(
            chain.data.at(record.data).of_replica(1), record.run.sources, seed=chain.seed
        )
        reference = Backprop(workers, choose_device(workers[0]))
        for worker, module in zip(workers, reference.model, strict=True):
            if worker.initial:
                load_initial(module, record.run.initial(worker.module))
        yield chain, workers, reference, source


def train_reference(record: Record, threads: int) -> None:
    """Train the concatenated network on the same batches.

    Write a line of metrics at the start and after each evaluation, as a tail does.
    """
    with opened(record, threads) as (chain, workers, reference, source):
        postpone_dynamo()
        step = samples = 0
        tail = workers[-1].tail
        selection = None
        if tail is not None and tail.selection is not None:
            selection = Selection(record.run, tail.selection, REFERENCE, 0)

        def tell(line: MetricsLine) -> None:
            head = {"time": time.time(), "module": REFERENCE, "attempt": 1}
            append_line(record.run.metrics(REFERENCE), head | line.to_dict())

        tell(StartLine(kind="start"))
        for epoch in range(1, chain.epochs + 1):
            for x, y_BY in source.train_batches(epoch):
                reference.train_batch(x, y_BY)
                step += 1
                samples += len(y_BY)
                if step == chain.steps:
                    break
            else:
                reference.end_epoch()
            last = epoch == chain.epochs or step == chain.steps
            if last or (chain.eval_every and epoch % chain.eval_every == 0):
                place: dict[str, Any] = {"epoch": epoch, "step": step, "trained": samples}
                result = evaluate(reference.predict, source.eval_batches(), workers[-1])
                tell(EvaluationLine(kind="eval", **place | result))
                if selection is not None:
                    selection.checkpoint(step)
                    last = selection.evaluated(result, epoch) or last
                if last and source.has_test:
                    reference.end_evaluation()
                    result = evaluate(reference.predict, source.test_batches(), workers[-1])
                    tell(EvaluationLine(kind="test", **place | result))
            if last:
                break
