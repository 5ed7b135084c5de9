"""The README's commands, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dni_runtime.image.apptainer import Apptainer

README = Path(__file__).resolve().parents[2] / "README.md"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def block(heading: str, language: str) -> str:
    """The first fenced block of a language below a heading."""
    section = README.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def run(script: str, folder: Path) -> str:
    environ = dict(os.environ)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's reader works, with the chain of "Use it"; three epochs of it will do."""
    folder = tmp_path_factory.mktemp("reader")
    commands = block("Use it", "sh").splitlines()
    # pip has installed the project already, or this test would not run; a reader's doctor may find
    # something missing that the rest does not need.
    assert [c.split()[:2] for c in commands[:3]] == [
        ["pip", "install"], ["dnictl", "doctor"], ["dnictl", "init"],
    ]  # fmt: skip
    run(commands[2], folder)
    chain = folder / "chain.yaml"
    text, epochs = re.subn(r"^epochs: \d+", "epochs: 3", chain.read_text(), flags=re.MULTILINE)
    assert epochs == 1
    chain.write_text(text)
    return folder


def test_use_it(folder: Path) -> None:
    run("\n".join(block("Use it", "sh").splitlines()[3:]), folder)
    code = block("Use it", "python")
    code += "\nprint(type(model).__name__)\nassert run.wait().phase == 'finished'"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "Sequential"


def test_the_example_chain_is_valid(tmp_path: Path) -> None:
    text = block("Use it", "yaml").replace("fashion-mnist", "digits").replace("784", "64")
    (tmp_path / "chain.yaml").write_text(text)
    run("dnictl validate", tmp_path)


@pytest.mark.apptainer
def test_containers(folder: Path, tool: Apptainer) -> None:
    shown = run(block("Containers", "sh"), folder)
    assert "training has finished" in shown or "epoch 3" in shown


@pytest.mark.slurm
def test_a_slurm_cluster(folder: Path, slurm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    profiles = folder / "config" / "dnictl" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "mycluster.yaml").write_text(f"interface: {slurm}\n")
    shown = run("export DNICTL_IMAGES=none\n" + block("A cluster", "sh"), folder)
    assert "node" in shown
    assert "finished after" in shown
