"""The tutorial: its files and commands, as printed, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dni_runtime import Run
from dni_runtime.image.apptainer import Apptainer
from tests.e2e.pages import DOCS, commands, python, shell, write_files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PAGE = "tutorial.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    write_files((DOCS / PAGE).read_text(), folder)
    return folder


def accuracy(printed: str) -> float:
    """That of a confusion matrix as the scripts print it."""
    counts = [
        [int(one) for one in re.findall(r"\d+", row)]
        for row in re.findall(r"\[([\d, ]+)\]", printed)
    ]
    assert sum(map(sum, counts)) == 600
    return sum(row[n] for n, row in enumerate(counts)) / 600


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """What the script printed that makes the chain and trains it; its files lie in the folder."""
    return shell(commands(PAGE, "The same as a chain"), folder)


def test_from_a_script_to_a_chain_and_back(folder: Path, trained: str) -> None:
    by_hand = accuracy(python("script.py", folder))
    assert accuracy(trained.split("\n\n")[0]) > by_hand - 0.05
    shell(commands(PAGE, "Train it on"), folder)
    first, second = [Run.open(one) for one in sorted((folder / "runs").iterdir())]
    assert first.status().epoch == 6
    assert second.status().epoch == 8
    assert second.status().accuracy > by_hand - 0.04
    shell(commands(PAGE, "Take it home"), folder)
    python("afterwards.py", folder)


def test_few_lines_change(folder: Path) -> None:
    """The loop becomes settings; network and data set stay as they are."""
    before, after = (
        {line.strip() for line in (folder / name).read_text().splitlines() if line.strip()}
        for name in ("script.py", "chain_train.py")
    )
    assert len(after - before) <= 12


@pytest.mark.usefixtures("trained")
def test_on_a_cluster(folder: Path) -> None:
    assert "#SBATCH --nodes=1" in shell(commands(PAGE, "On a cluster"), folder)


@pytest.mark.apptainer
@pytest.mark.usefixtures("trained")
def test_in_containers(folder: Path, tool: Apptainer) -> None:
    assert "finished after" in shell(commands(PAGE, "In containers"), folder)
