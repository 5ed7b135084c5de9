"""Worker processes without a launcher, and the same chain in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

import torch
from safetensors.torch import load_file

from dni_runtime.core.chain import LocalChain
from dni_runtime.data import describe, open_data
from dni_runtime.files import write_atomic
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, WorkerSpec
from tests.e2e.programs import Program


def workers_of(chain: ChainSpec) -> tuple[WorkerSpec, ...]:
    return worker_specs(chain, describe(chain.data, Path()))


class Chain:
    """A run directory and the worker processes in it."""

    def __init__(self, root: Path, chain: ChainSpec) -> None:
        self.run = RunDir(root)
        self.workers = workers_of(chain)
        self.names = [worker.module for worker in self.workers]
        self.processes: dict[str, Program] = {}
        self.run.create()
        RunRecord(
            run="test", chain="c", modules=tuple(self.names), backend="process", epochs=1,
            created=0.0, chain_file=Path("c.yaml"),
        ).write(self.run.record)  # fmt: skip
        for worker in self.workers:
            write_atomic(self.run.spec(worker.module), worker.to_json())

    def start(self, attempt: int = 1, **options: Sequence[str]) -> None:
        """Start all workers, each with its further options, by name."""
        for name in self.names:
            self.start_one(name, *options.get(name, ()), attempt=attempt)

    def start_one(self, name: str, *options: str, attempt: int = 1) -> None:
        log = self.run.log(name, attempt)
        arguments = ["--run", str(self.run.root), "--module", name, "--attempt", str(attempt)]
        self.processes[name] = Program(
            "dni_runtime.worker", [*arguments, *options], Path(), os.environ, log
        )

    def wait(self, deadline_s: float = 90) -> dict[str, int]:
        end = time.monotonic() + deadline_s
        return {
            name: process.wait(max(end - time.monotonic(), 0.1))
            for name, process in self.processes.items()
        }

    def wait_until(self, condition: Callable[[], bool], deadline_s: float = 60) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, self.logs()
            assert all(p.poll() in (None, 0) for p in self.processes.values()), self.logs()
            time.sleep(0.02)

    def step_of(self, name: str) -> int:
        return Report.read(self.run.worker(name)).step or 0

    def logs(self) -> str:
        return "\n".join(f.read_text() for f in sorted((self.run.root / "logs").iterdir()))

    def weights(self) -> dict[str, torch.Tensor]:
        cut = complete_cuts(self.run, self.names)[-1]
        tensors = {}
        for name in self.names:
            state = load_file(self.run.checkpoint(cut, name).with_suffix(".safetensors"))
            for key, it in state.items():
                if key.startswith("layers."):
                    tensors[name + key.removeprefix("layers")] = it
        return tensors

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def reference_weights(chain: ChainSpec, steps: int) -> dict[str, torch.Tensor]:
    """The weights after training in one process, as ``Chain.weights``."""
    local = LocalChain(workers_of(chain))
    source = open_data(chain.data, Path(), seed=chain.seed)
    batches = (batch for epoch in count(1) for batch in source.train_batches(epoch))
    for x, y in islice(batches, steps):
        local.train_batch(x, y)
    return {
        f"{step.spec.module}.{key}": it
        for step in local.steps
        for key, it in step.layers.state_dict().items()
    }


def largest_difference(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((it.double() - theirs[key].double()).abs().max()) for key, it in ours.items())
