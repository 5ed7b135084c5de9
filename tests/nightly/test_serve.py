"""More networks that answer as the exported ones do; CI has the demo and one with two inputs."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Site, site
from tests.e2e.test_serve import serve_template

__all__ = ["site"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("template", ["resnet", "lm", "gpt"])
def test_networks_answer(site: Site, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """Images, bytes, and weights that two modules share."""
    serve_template(site, monkeypatch, template)
