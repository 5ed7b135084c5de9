"""Templates and a split network in containers; CI trains the like in processes."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Site, site
from tests.e2e.test_split import train_split, train_template

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
    train_template(site, template, epochs, metric, enough, "apptainer")


def test_exact_is_plain_pytorch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    train_split(site, monkeypatch, "apptainer")
