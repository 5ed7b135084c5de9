"""What a worker does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from dni_runtime.core.dynamo import postpone_dynamo
from tests.specs import specs_of
from tests.unit.core.conftest import CHAIN, INFO

BEGIN = """\
import sys
from dni_runtime.core.dynamo import postpone_dynamo
postpone_dynamo()
import torch
real = lambda: "torch._dynamo.eval_frame" in sys.modules
"""


RUN_EACH = """
import json, os, traceback
for line in sys.stdin:
    if not (child := os.fork()):
        try:
            exec(json.loads(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""

Python = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    """Runs code in a process that has postponed dynamo and imported torch, and done nothing else.

    It is a child of one that stays like this: importing torch takes longest.
    """
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + RUN_EACH],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DNI_QUICK_START": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip

        def run(code: str) -> list[str]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(code) + "\n")
            words: list[str] = []
            while "ended" not in words:
                line = process.stdout.readline()
                assert line, "it has ended"
                words += line.split()
            assert words[-2:] == ["ended", "0"]
            return words[:-2]

        yield run


@pytest.mark.parametrize("interface", ["mixed", "delayed"])
def test_a_module_is_trained_without_it(python: Python, interface: str) -> None:
    code = """\
from dni_runtime.core.step import ModuleStep
from dni_runtime.spec import WorkerSpec
for text in {specs!r}:
    step = ModuleStep(WorkerSpec.from_json(text))
    h = step.forward(1, torch.ones(4, step.spec.inputs[0].shape[0]))
    step.update(torch.zeros(4, dtype=torch.int64))
    if step.interface is not None:
        step.late_gradient(1, torch.ones_like(h))
    assert step.batches == 1
    for one in step.optimization.optimizers.values():
        one.load_state_dict(one.state_dict())
print(real(), "sympy" in sys.modules)
"""
    workers = specs_of(CHAIN % (interface, "{Adam: {lr: 0.01}}"), INFO)
    specs = [worker.to_json() for worker in workers]
    assert python(code.format(specs=specs)) == ["False", "False"]


def test_who_compiles_gets_the_real_one(python: Python) -> None:
    code = """\
torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
print(real())
compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
print(tuple(compiled(torch.ones(3, 2)).shape) == (3, 2), real())
"""
    assert python(code) == ["False", "True", "True"]


def test_parts_of_it_can_be_imported(python: Python) -> None:
    code = """\
import inspect
import torch._dynamo
inspect.getmodule(print)
print(real())
from torch._dynamo import config
import torch._dynamo.backends
print(real(), torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.config is config)
"""
    assert python(code) == ["False", "True", "True", "True"]


def test_a_part_that_is_imported_first_is_the_one_that_the_others_use(python: Python) -> None:
    code = """\
import torch._dynamo.config as part
from torch._dynamo import eval_frame
print(real(), eval_frame.config is part, part.__spec__.origin == part.__file__)
"""
    assert python(code) == ["True", "True", "True"]


def test_it_is_imported_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [*sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", [*before])
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setenv("DNI_QUICK_START", "")
    postpone_dynamo()
    assert sys.meta_path == before
    monkeypatch.setenv("DNI_QUICK_START", "1")
    postpone_dynamo()
    assert type(sys.meta_path[0]).__module__ == "dni_runtime.core.dynamo"


def test_who_has_it_keeps_it(python: Python) -> None:
    code = """\
sys.meta_path.pop(0)
import torch._dynamo
before = torch._dynamo
postpone_dynamo()
import torch._dynamo
print(real(), torch._dynamo is before)
"""
    assert python(code) == ["True", "True"]
