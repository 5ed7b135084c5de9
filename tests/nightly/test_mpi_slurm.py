"""docs/mpi.md: the ways that CI does not go."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dni_runtime.image.apptainer import Apptainer
from tests.e2e.conftest import Site, processes_of, site, slurm, tool
from tests.e2e.test_mpi import block, mpirun, sh, train_in_a_job, write

__all__ = ["mpirun", "site", "slurm", "tool"]

pytestmark = [pytest.mark.e2e, pytest.mark.apptainer, pytest.mark.timeout(600)]


def test_the_page(
    tool: Apptainer, site: Site, mpirun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands: containers by the printed command, and by the one by hand."""
    programs = f"{Path(tool.path).parent}:{Path(sys.executable).parent}"
    monkeypatch.setenv("PATH", programs, prepend=os.pathsep)
    write(site.folder, 6)
    sh(site.folder, block("", 0))
    figures = site.json("status")
    assert (figures["state"], figures["backend"]) == ("finished", "apptainer")
    assert figures["accuracy"] > 0.85
    assert [module["state"] for module in figures["modules"]] == ["finished"] * 4
    assert "epoch 6" in site.run("logs", "top").stdout

    hand = block("", 1)
    assert hand.startswith("mpirun -n 4 apptainer run ")
    site.run("mpi", "chain.yaml", "--run-dir", "runs/b")
    sh(site.folder, hand.replace("runs/a", "runs/b"))
    assert site.json("status", "runs/b")["state"] == "finished"
    assert not processes_of(site.folder)


@pytest.mark.slurm
def test_the_page_in_a_slurm_job_by_pmix(tool: Apptainer, slurm: str, tmp_path: Path) -> None:
    """PMIx's files lie in /tmp, which the testbed's hosts share, so here it is for one host."""
    train_in_a_job("pmix", {"n1"}, slurm, tmp_path)
