"""Plain backpropagation of a chain's network in one process, as a run directory of its own."""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from dni_runtime.core.chain import Backprop, evaluate
from dni_runtime.data import open_data
from dni_runtime.errors import WorkerError
from dni_runtime.launch.prepare import importing_from
from dni_runtime.launch.records import Record
from dni_runtime.launch.start import last_lines
from dni_runtime.rundir import append_line

REFERENCE = "backprop"


def run_reference(record: Record, threads: int) -> None:
    """Train in a new process, so that its number of threads is its own.

    Args:
        record: A run directory that was made for it.
        threads: Threads of its computations.

    Raises:
        WorkerError: The process failed.
    """
    log = record.run.log(REFERENCE, 1)
    command = [sys.executable, "-P", "-m", "dnictl", "reference", str(record.run.root)]
    with log.open("wb") as file:
        done = subprocess.run(
            [*command, "--threads", str(threads)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    if done.returncode != 0:
        lines = "\n".join(f"  | {line}" for line in last_lines(log))
        raise WorkerError(f"plain backpropagation failed\n  log: {log}\n{lines}")


def train_reference(record: Record, threads: int) -> None:
    """Train the concatenated network on the same batches, on the CPU in float32.

    Writes a line of metrics at the start and after each epoch, as a tail does.

    Args:
        record: The run directory.
        threads: Threads of the computations.
    """
    torch.set_num_threads(threads)
    chain, workers = record.specs()
    data = chain.data
    if record.data is not None:
        data = data.model_copy(update={"path": str(record.data)})
    with importing_from(record.run.sources):
        reference = Backprop(workers)
        source = open_data(data, record.run.sources, seed=chain.seed)
        step = samples = 0

        def tell(**values: object) -> None:
            head = {"time": time.time(), "module": REFERENCE, "attempt": 1}
            append_line(record.run.metrics(REFERENCE), head | values)

        tell(kind="start")
        for epoch in range(1, chain.epochs + 1):
            for x_BX, y_BY in source.train_batches(epoch):
                reference.train_batch(x_BX, y_BY)
                step += 1
                samples += len(x_BX)
                if step == chain.steps:
                    break
            else:
                reference.end_epoch()
            last = epoch == chain.epochs or step == chain.steps
            if last or (chain.eval_every and epoch % chain.eval_every == 0):
                result = evaluate(reference.model, source.eval_batches(), workers[-1])
                tell(kind="eval", epoch=epoch, step=step, trained=samples, **result)
            if step == chain.steps:
                break
