"""A network taken apart, trained by real workers: what plain PyTorch gives, under its own names."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from dni_runtime import Chain, Run
from dni_runtime.data import open_data
from dni_runtime.launch.prepare import importing_from
from tests.e2e.conftest import Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOURCE = Path(__file__).parents[1] / "data" / "words.py"
STEPS = 20
TORCH = version("torch").split("+")[0]


@pytest.mark.parametrize(
    "backend", ["process", pytest.param("apptainer", marks=pytest.mark.apptainer)]
)
def test_exact_is_plain_pytorch(site: Site, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A skip, tied weights and a mask cross the cuts; the result goes back into the network."""
    shutil.copy(SOURCE, site.folder)
    monkeypatch.chdir(site.folder)
    chain = Chain.split(
        "words:Model",
        data={"dataset": "words:Words", "batch_size": 8},
        at=["begin", "first", "second"],
        epochs=9,
        steps=STEPS,
        image={"torch": f"torch=={TORCH}"},
        defaults={"interface": "exact", "optimizer": {"Adam": {"lr": 0.01}}},
    )
    assert len(chain.modules) == 4
    if backend == "apptainer":
        site.run("build")
    site.run("up", "--backend", backend)
    site.run("export", "--state-dict", "-o", "trained.pt")
    found = torch.load("trained.pt", weights_only=True)

    with importing_from(site.folder):
        import words  # type: ignore[import-not-found]

        source = open_data(chain.prepared.chain.data, site.folder, seed=0)
    try:
        model = words.Model()
        model.load_state_dict(load_file("chain.safetensors"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        batches = (batch for epoch in range(1, 10) for batch in source.train_batches(epoch))
        for _ in range(STEPS):
            (tokens, mask), y = next(batches)
            optimizer.zero_grad()
            cross_entropy(model(tokens, mask).transpose(1, 2), y).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
        words.Model().load_state_dict(found, strict=True)
    finally:
        sys.modules.pop("words", None)


@pytest.mark.apptainer
@pytest.mark.parametrize(
    ("template", "epochs", "metric", "enough"),
    [
        ("resnet", 2, "accuracy", 0.9),
        ("vit", 6, "accuracy", 0.5),
        ("two-tower", 4, "accuracy", 0.85),
        ("gpt", 1, "loss", 3.5),
    ],
)
def test_templates_train_in_containers(
    site: Site, template: str, epochs: int, metric: str, enough: float
) -> None:
    site.run("init", "--template", template)
    chain = site.folder / "chain.yaml"
    text = re.sub(r"epochs: \d+", f"epochs: {epochs}", chain.read_text())
    text += f'image: {{torch: "torch=={TORCH}"}}\n'
    if template == "gpt":
        text += "steps: 60\n"
    chain.write_text(text)
    site.run("build")
    site.run("up", "--backend", "apptainer")
    figures = Run.open(site.latest.root).status().evaluations[-1]
    found = float(figures[metric])  # type: ignore[arg-type]
    assert found > enough if metric == "accuracy" else found < enough
    site.run("export", "--state-dict", "-o", "weights.safetensors")
