"""The tutorial: its files and commands, as printed, one after the other."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dni_runtime import Run
from dni_runtime.image.apptainer import Apptainer
from tests.e2e.conftest import Dnictl
from tests.e2e.test_readme import run as in_bash

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def commands(heading: str) -> str:
    """The commands below a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(text)
    return folder


def shell(commands: str, folder: Path) -> str:
    """Run commands one after the other; ``dnictl`` is a fork of this process."""
    shown = []
    for line in commands.splitlines():
        words = shlex.split(in_bash(f"printf '%q ' {line}", folder), comments=True)
        if words[0] == "dnictl":
            shown.append(Dnictl(folder).run(*words[1:]).stdout)
        else:
            shown.append(in_bash(line, folder))
    return "\n\n".join(shown)


def python(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(printed: str) -> float:
    """That of a confusion matrix as the scripts print it."""
    counts = [
        [int(one) for one in re.findall(r"\d+", row)]
        for row in re.findall(r"\[([\d, ]+)\]", printed)
    ]
    assert sum(map(sum, counts)) == 600
    return sum(row[n] for n, row in enumerate(counts)) / 600


def test_from_a_script_to_a_chain_and_back(folder: Path) -> None:
    by_hand = accuracy(python("script.py", folder))
    shown = shell(commands("The same as a chain"), folder)
    assert accuracy(shown.split("\n\n")[0]) > by_hand - 0.05
    shell(commands("Train it on"), folder)
    first, second = [Run.open(one) for one in sorted((folder / "runs").iterdir())]
    assert first.status().epoch == 6
    assert second.status().epoch == 8
    assert second.status().accuracy > by_hand - 0.02
    shell(commands("Take it home"), folder)
    python("afterwards.py", folder)


def test_on_a_cluster(folder: Path) -> None:
    assert "#SBATCH --nodes=1" in shell(commands("On a cluster"), folder)


@pytest.mark.apptainer
def test_in_containers(folder: Path, tool: Apptainer) -> None:
    assert "finished after" in shell(commands("In containers"), folder)
