"""Worker specs and run directories without torch and data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dni_runtime.plan.create import create_run
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.plan.settings import Site, StartRequest, StartSettings, make_plan
from dni_runtime.run.cuts import document_file, sealed, tensors_file
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import (
    ChainSpec,
    Choice,
    DataInfo,
    EdgeSpec,
    HeadRole,
    TailRole,
    TensorSpec,
    WorkerSpec,
    parse_chain,
)

NAMES = ("bottom", "middle", "top")

CHAIN = """\
name: small
epochs: 4
defaults: {device: cpu}
modules:
  - {name: bottom, layers: [ReLU]}
  - {name: middle, layers: [ReLU]}
  - {name: top, layers: [ReLU]}
"""

MakeWorker = Callable[..., WorkerSpec]


@pytest.fixture
def chain() -> ChainSpec:
    return parse_chain(CHAIN)


def _link(target: int) -> EdgeSpec:
    tensor = TensorSpec(shape=(8,), dtype="float32")
    ends = {"source": NAMES[target - 1], "target": NAMES[target]}
    return EdgeSpec(**ends, number=target, tensor=tensor, gradients=1)


def _worker(index: int, *, device: str = "cpu", cpus: int = 1) -> WorkerSpec:
    """The spec of one of three modules."""
    chain = parse_chain(CHAIN)
    tensor = TensorSpec(shape=(8,), dtype="float32")
    last = len(NAMES) - 1
    return WorkerSpec(
        chain=chain.name,
        module=NAMES[index],
        index=index,
        layers=chain.modules[index].layers,
        interface=None if index == last else Choice(name="mixed"),
        optimizer=Choice(name="Adam"),
        loss=chain.loss,
        seed=0,
        device=device,
        cpus=cpus,
        sources=() if index == 0 else (_link(index),),
        targets=() if index == last else (_link(index + 1),),
        output=tensor,
        label=TensorSpec(shape=(), dtype="int64"),
        prediction=tensor,
        classes=8,
        batch_limit=512,
        gradients_in=int(index < last),
        late=0,
        links=chain.links,
        keep=2,
        stop_grace_s=chain.stop_grace_s,
        head=HeadRole(
            samples=(tensor,),
            data=chain.data,
            epochs=4,
            steps=None,
            eval_every=1,
            checkpoint=chain.checkpoint,
        )
        if index == 0
        else None,
        tail=TailRole(metrics=(Choice(name="accuracy"),)) if index == last else None,
    )


@pytest.fixture
def make_worker() -> MakeWorker:
    return _worker


@pytest.fixture
def workers() -> tuple[WorkerSpec, ...]:
    return tuple(_worker(index) for index in range(len(NAMES)))


@pytest.fixture
def prepared(tmp_path: Path, chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> CheckedChain:
    """A checked chain with one source file, whose chain file is real."""
    folder = tmp_path / "project"
    folder.mkdir()
    path = folder / "chain.yaml"
    path.write_text(CHAIN)
    source = folder / "layers.py"
    source.write_text("pass\n")
    info = DataInfo(
        sample=workers[0].inputs[0], label=workers[0].label, classes=8, train_samples=1000
    )
    return CheckedChain(path, chain, chain, info, None, workers, {"pkg/layers.py": source}, {})


@pytest.fixture
def record(tmp_path: Path, prepared: CheckedChain) -> Record:
    """The record of a fresh run."""
    root = tmp_path / "runs" / "small-1"
    create_run(root, prepared, backend="process")
    return Record.read(root)


@pytest.fixture
def plan(
    tmp_path: Path, chain: ChainSpec, workers: tuple[WorkerSpec, ...], record: Record
) -> LaunchPlan:
    """A plan for the fresh run."""
    site = Site("process", sockets=tmp_path / "sockets")
    return make_plan(StartRequest(chain, workers, StartSettings(record.run.root), site))


def write_over(run: RunDir, module: str) -> None:
    """Write a module's part of the cut at the end of the stream."""
    part, data = run.checkpoint(9, module), b"tensors"
    part.parent.mkdir(exist_ok=True)
    tensors_file(part).write_bytes(data)
    document_file(part).write_text(sealed(data, {"cut": 9, "over": True, "bytes": len(data)}))
