"""Settings of all tests, and specs of two neighbouring modules, ``stem`` and ``tail``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.garbage import collect_seldom
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import Choice, LayerSpec, LinksSpec, TensorSpec, WorkerSpec
from dni_runtime.spec.edge import EdgeSpec
from tests.specs import float32, int64

# Figures agree to the last digit, whatever the CPU (docs/architecture.md, `exact`). MKL reads this
# once, at a process's first product: it is set before any test, here and for what tests start.
os.environ["MKL_CBWR"] = "AUTO"
# Threads of a worker that has nothing to compute sleep: by default they try again and again, which
# costs 13 times the processor time in a module of 64 features (OMP_WAIT_POLICY in OpenMP 5.0).
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Thousands of workers start: none imports what only torch.compile needs, but in its own test.
os.environ["DNI_QUICK_START"] = "1"
# Whether there is a GPU is asked so that forks can use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
collect_seldom()  # thousands of tests beside what torch has brought
torch.set_num_threads(1)  # tests run beside each other; more threads only fight for cores

MakeSpec = Callable[..., WorkerSpec]

_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: see 'make gpu'")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])]
"""Where a test runs: ``@pytest.mark.parametrize("device", DEVICES)``."""


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test has imported from a folder of its own: others have files of that name."""
    before, base = {*sys.modules}, str(tmp_path_factory.getbasetemp())
    yield
    for name in {*sys.modules} - before:
        if str(vars(sys.modules[name]).get("__file__")).startswith(base):
            del sys.modules[name]


def needs_slurm(nodeid: str) -> bool:
    return ("e2e" in nodeid or "nightly" in nodeid) and "slurm" in nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process a file at a time; those that share the one Slurm go to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "slurm" if needs_slurm(nodeid) else nodeid.partition("::")[0]

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: Slurm's, one after the other; unit tests come last."""
    for item in items:
        if item.get_closest_marker("slurm") is not None and not needs_slurm(item.nodeid):
            raise pytest.UsageError(f"it needs Slurm, so name it after that: {item.nodeid}")
    folders = ("tests/simulation", "tests/e2e", "tests/generated", "tests/integration")
    items.sort(
        key=lambda item: (
            not needs_slurm(item.nodeid),
            *(not item.nodeid.startswith(folder) for folder in folders),
        )
    )


def eventually(
    what: str, condition: Callable[[], object], within_s: float = 60, every_s: float = 0.1
) -> None:
    """Wait until something is so, or fail."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"not within {within_s} s: {what}"
        time.sleep(every_s)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run's folder in which nothing has happened."""
    run = RunDir(tmp_path)
    run.create()
    return run


_FLOAT_4 = float32(4)


@pytest.fixture
def make_spec() -> MakeSpec:
    """Make one module's spec; keywords replace fields, or settings of its one link."""

    def make(
        module: str = "stem",
        *,
        output: TensorSpec = _FLOAT_4,
        downstream: str = "tail",  # of the stem, as the next one
        gradients_in: int = 1,
        upstream: str = "stem",  # of the tail, as all that follow
        input: TensorSpec = _FLOAT_4,
        gradients_out: int = 1,
        awaited_out: bool = False,
        resend_out: int = 0,
        **fields: Any,
    ) -> WorkerSpec:
        head = module == "stem"
        edge = EdgeSpec(
            source=module if head else upstream,
            target=downstream if head else module,
            number=1,
            tensor=output if head else input,
            gradients=gradients_in if head else gradients_out,
            awaited=awaited_out and not head,
            resend=0 if head else resend_out,
        )
        settings: dict[str, Any] = {
            "chain": "pair",
            "module": module,
            "index": 0 if head else 1,
            "layers": (LayerSpec(type="Identity"),),
            "optimizer": Choice(name="Adam"),
            "loss": Choice(name="CrossEntropyLoss"),
            "seed": 0,
            "sources": () if head else (edge,),
            "targets": (edge,) if head else (),
            "output": output,
            "label": int64(),
            "prediction": _FLOAT_4,
            "classes": 4,
            "batch_limit": 8,
            "gradients_in": gradients_in if head else 0,
            "late": 4 * int(head),
            "links": LinksSpec(window=4),
            "keep": 2,
            "stop_grace_s": 5.0,
            "head": None,
            "tail": None,
        }
        return WorkerSpec(**settings | fields)

    return make
