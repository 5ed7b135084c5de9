"""Templates and a split network in containers; CI trains the like of the latter in processes."""

from __future__ import annotations

import re

import pytest

from dni_runtime import Run
from tests.e2e.conftest import Site, site
from tests.e2e.test_split import TORCH, train_split

__all__ = ["site"]

pytestmark = [pytest.mark.e2e, pytest.mark.apptainer, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("template", "epochs", "metric", "enough"),
    [
        ("resnet", 1, "accuracy", 0.7),
        ("gpt", 1, "loss", 3.7),
        ("vit", 4, "accuracy", 0.35),
        ("two-tower", 2, "accuracy", 0.7),
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
        text += "steps: 40\n"
    chain.write_text(text)
    site.run("build")
    site.run("up", "--backend", "apptainer")
    figures = Run.open(site.latest.root).status().evaluations[-1]
    found = figures.figures[metric]
    assert found is not None
    assert found > enough if metric == "accuracy" else found < enough
    site.run("export", "--state-dict", "-o", "weights.safetensors")


def test_exact_is_plain_pytorch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    train_split(site, monkeypatch, "apptainer")
