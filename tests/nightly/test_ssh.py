"""Containers on hosts that ssh reaches."""

from __future__ import annotations

import pytest

from dni_runtime.files import read_json
from dni_runtime.image.apptainer import Apptainer
from tests.e2e.conftest import Site, site, tool
from tests.e2e.test_slurm import build_images
from tests.e2e.test_ssh import hosts

__all__ = ["hosts", "site", "tool"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.apptainer
def test_containers_on_two_hosts(tool: Apptainer, site: Site, hosts: str) -> None:
    build_images(site.folder, "lo", "curve")
    figures = site.json("up", "--hosts", hosts, "--backend", "apptainer")
    assert (figures["state"], figures["backend"]) == ("finished", "apptainer")
    assert figures["accuracy"] > 0.85
    plan = read_json(site.latest.plan)
    assert plan is not None
    assert [(worker["node"], bool(worker["image"])) for worker in plan["workers"]] == [
        ("a", True), ("b", True),
    ]  # fmt: skip
    assert "encrypted" in site.latest.log("top", 1).read_text()
    assert not site.latest.keys.exists()
