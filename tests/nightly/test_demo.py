"""The demo's chain beside backpropagation, step by step; CI compares what both have learned."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.resources import files
from itertools import islice
from pathlib import Path

import pytest

from dni_runtime import load
from dni_runtime.core.chain import Backprop
from dni_runtime.data import describe, open_data
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import load_chain
from tests.e2e.conftest import Dnictl, fashion_mnist, tool

__all__ = ["fashion_mnist", "tool"]

pytestmark = [pytest.mark.apptainer, pytest.mark.e2e, pytest.mark.timeout(900)]

TORCH = version("torch").split("+")[0]


def test_exact_is_backprop_on_the_demos_chain(
    tool: Apptainer, fashion_mnist: Path, tmp_path: Path
) -> None:
    """50 steps of the demo's network on real data, in four containers and in this process."""
    text = (files("dni_runtime.definitions") / "chains" / "fashion-cdni.yaml").read_text()
    text = text.replace("  flatten: true\n", f"  flatten: true\n  path: {fashion_mnist}\n")
    text, exact = re.subn(r"synthetic: {.*}\n", "exact\n", text)
    assert exact == 1
    text = text.replace("epochs: 15\n", f"epochs: 1\nsteps: 50\nimage: {{torch: torch=={TORCH}}}\n")
    (tmp_path / "chain.yaml").write_text(text)
    shell = Dnictl(tmp_path)
    shell.run("build")
    shell.run("up", "--backend", "apptainer")
    shell.run("export", "-o", "model.safetensors")
    chain = load_chain(tmp_path / "chain.yaml")
    reference = Backprop(worker_specs(chain, describe(chain.data, tmp_path)))
    batches = open_data(chain.data, tmp_path, seed=chain.seed).train_batches(1)
    for x_BX, y_BY in islice(batches, 50):
        reference.train_batch(x_BX, y_BY)
    trained = load(tmp_path / "model.safetensors").parameters()
    pairs = list(zip(trained, reference.model.parameters(), strict=True))
    assert len(pairs) == 14
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-5
