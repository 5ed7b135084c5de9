"""``init``, ``validate``, ``config``, ``schema``; what ``up`` and ``run`` would start."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dni_runtime.resolve.advice import RECIPE
from tests.unit.cli.conftest import Dnictl, WriteChain


@pytest.mark.parametrize("template", ["mlp", "cnn", "lm", "vit"])
def test_templates_are_valid(template: str, dnictl: Dnictl, folder: Path) -> None:
    assert dnictl("init", "--template", template).code == 0
    result = dnictl("validate", "--json")
    assert result.code == 0
    assert result.json["valid"] is True
    assert len(result.json["modules"]) >= 3
    assert result.json["warnings"] == []


def test_split_names_what_attention_learns_best_by(dnictl: Dnictl) -> None:
    """Unless the settings say what to learn by; what it names is what 'validate' names."""
    dnictl("init", "--template", "vit")
    args = "{channels: 1, size: 8, patch: 2, classes: 10}"
    command = ["split", "vit:ViT", "--args", args, "-n", "2", "-o", "two.yaml"]
    told = dnictl(*command, "--data", "{dataset: digits, batch_size: 8}")
    assert told.code == 0, told.err
    assert RECIPE in told.out + told.err
    (warning,) = dnictl("validate", "two.yaml", "--json").json["warnings"]
    assert RECIPE in warning
    told = dnictl(*command, "--settings", "chain.yaml")
    assert told.code == 0, told.err
    assert "Muon" not in told.out + told.err


def test_a_template_may_have_programs(dnictl: Dnictl, folder: Path) -> None:
    (folder / "models").mkdir()
    result = dnictl("init", "--template", "lm", "models/first.yaml")
    assert result.code == 0
    written = ["first.yaml", "generate.py", "lm.py"]
    assert result.out.splitlines() == [f"wrote models/{name}" for name in written]
    assert sorted(entry.name for entry in (folder / "models").iterdir()) == written


@pytest.mark.parametrize("existing", ["chain.yaml", "generate.py", "lm.py"])
def test_a_template_is_written_as_a_whole(dnictl: Dnictl, folder: Path, existing: str) -> None:
    (folder / existing).write_text("mine")
    result = dnictl("init", "--template", "lm")
    assert result.code == 64
    assert f"'{existing}' already exists" in result.err
    assert [entry.name for entry in folder.iterdir()] == [existing]
    assert (folder / existing).read_text() == "mine"


def test_a_drawing_may_name_any_module(dnictl: Dnictl, write_chain: WriteChain) -> None:
    """``end`` ends a subgraph in Mermaid's own words."""
    path = write_chain()
    path.write_text(path.read_text().replace("name: top", "name: end"))
    drawn = dnictl("graph", path, "--format", "mermaid")
    assert drawn.out.splitlines() == [
        "flowchart TD",
        '  m1["bottom<br>2,144 parameters, mixed"]',
        '  m2["end<br>330 parameters, loss"]',
        '  m1 -->|"float32[B x 32]"| m2',
    ]


def test_validate(dnictl: Dnictl, write_chain: WriteChain) -> None:
    path = write_chain()
    result = dnictl("validate", path)
    assert result.code == 0
    assert "chain 'small' is valid, 2 modules, 2,474 parameters" in result.out
    document = dnictl("validate", path, "--json").json
    assert document["parameters"] == 64 * 32 + 32 + 64 + 32 * 10 + 10
    assert document["modules"][0]["output"] == "float32[B x 32]"
    assert document["modules"][1]["interface"] is None
    assert document["total_steps"] == 2 * document["batches_per_epoch"]
    assert document["checked"][1:3] == ["1437 of 1437 samples (train)", "360 of 360 samples (eval)"]
    assert document["unchecked"] == []
    assert "checked: names, keywords and shapes; 1437 of 1437 samples" in result.out


def test_config_can_be_read_back(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    result = dnictl("config", write_chain())
    assert result.code == 0
    document = yaml.safe_load(result.out)
    assert document["modules"][0]["optimizer"] == {"Adam": {"lr": 0.002}}
    (folder / "again.yaml").write_text(result.out)
    assert dnictl("config", "again.yaml", "--json").json == document


def test_schema(dnictl: Dnictl) -> None:
    document = dnictl("schema").json
    assert document["type"] == "object"
    assert "modules" in document["properties"]


def test_dry_run_for_hosts(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    """No host is asked."""
    path = write_chain(("epochs: 2", "epochs: 2\nlinks: {interface: lo}"))
    result = dnictl("up", path, "--dry-run", "--backend", "process", "--hosts", "no.a,no.b")
    assert result.code == 0, result.err
    commands = [line for line in result.out.splitlines() if line.startswith("ssh ")]
    assert [" -- no.a " in line for line in commands] == [True, False]
    assert [" -- no.b " in line for line in commands] == [False, True]
    assert "OMP_NUM_THREADS=1 \\" not in result.out
    assert not (folder / "runs").exists()


def test_dry_run_prints_the_plan(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    path = write_chain()
    result = dnictl("up", path, "--dry-run", "--backend", "process", "--run-dir", "my run")
    assert result.code == 0
    assert f"# run {folder}/my run, backend process" in result.out
    assert result.out.count("-m dni_runtime.worker") == 2
    document = dnictl("up", path, "--dry-run", "--backend", "process", "--json").json
    assert [worker["module"] for worker in document["workers"]] == ["bottom", "top"]
    assert sorted(entry.name for entry in folder.iterdir()) == ["chain.yaml"]


def test_one_module_by_hand(dnictl: Dnictl, write_chain: WriteChain) -> None:
    write_chain()
    result = dnictl("run", "top", "--run-dir", "r", "--dry-run", "--backend", "process")
    assert result.code == 0
    assert "--module top" in result.out
    assert not Path("r").exists()
