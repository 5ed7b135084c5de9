"""A chain whose workers have no more of the runtime than an image holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dni_runtime.image.layers import runtime_files, write_layer
from dni_runtime.spec import parse_chain
from tests.e2e.workers import Chain

pytestmark = pytest.mark.timeout(180)

CHAIN = """
name: c
data: {batch_size: 512}
defaults: {interface: synthetic}
modules:
  - {name: bottom, layers: [Flatten, Linear: {in_features: 64, out_features: 16}, ReLU]}
  - {name: top, layers: [Linear: {in_features: 16, out_features: 10}]}
"""


def test_workers_train_with_the_files_of_an_image(tmp_path: Path) -> None:
    runtime, told = tmp_path / "runtime", tmp_path / "told.txt"
    files = {name: path.read_bytes() for name, path in runtime_files().items()}
    files["sitecustomize.py"] = f"""
import dni_runtime
with open({str(told)!r}, "a") as file:
    print(dni_runtime.__file__, file=file)
""".encode()
    write_layer(files, runtime)
    chain = Chain(tmp_path / "run", parse_chain(CHAIN))
    command = [sys.executable, "-m", "dni_runtime.worker", "--run", str(chain.run.root)]
    workers = [
        subprocess.Popen(
            [*command, "--module", name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(runtime)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in chain.names
    ]
    try:
        errors = [worker.communicate(timeout=150)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    assert told.read_text().split() == [str(runtime / "dni_runtime" / "__init__.py")] * 2
