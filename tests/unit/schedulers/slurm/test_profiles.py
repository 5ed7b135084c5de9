"""Site profiles: where they are found, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import SpecError, UsageError
from dni_runtime.schedulers.slurm.profiles import load_profile, parse_profile, profile_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "dnictl" / "profiles"
    folder.mkdir(parents=True)
    return folder


def test_the_packaged_example_is_valid_and_found(folder: Path) -> None:
    assert list(profile_files()) == ["example"]
    example = load_profile("example")
    assert example.account == "my-project"
    assert example.prologue == ("module load apptainer",)
    assert example.time == "04:00:00"


def test_times_need_no_quotes(folder: Path) -> None:
    """YAML 1.1 makes a number of 4:00:00; chains are read as YAML 1.2, and so are profiles."""
    assert parse_profile("time: 4:00:00", file="mine.yaml").time == "4:00:00"


def test_the_users_own_come_first(folder: Path) -> None:
    (folder / "example.yaml").write_text("partition: mine\n")
    (folder / "empty.yaml").write_text("")
    assert load_profile("example").partition == "mine"
    assert load_profile("empty") == load_profile(None)


def test_an_unknown_name_gets_a_suggestion(folder: Path) -> None:
    (folder / "juwels.yaml").write_text("{}")
    with pytest.raises(UsageError) as caught:
        load_profile("jewels")
    assert "did you mean 'juwels'?" in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acount: x", ["unknown key 'acount'", "account"]),
        ("gpu_request: gpus", ["gpu_request", "'gpus'", "gpus-per-node"]),
        ("account: 'two words'", ["account", "two words"]),
        ("directives: [mail-type=FAIL]", ["directives", "mail-type=FAIL"]),
        ('directives: ["--a=1\\n#SBATCH --uid=0"]', ["directives"]),
        ("binds: [software]", ["binds", "'software'", "absolute"]),
        ('scratch: "/a\';rm"', ["scratch"]),
        ("max_requeues: -1", ["max_requeues", "-1"]),
        ("account: [", ["not valid YAML"]),
        ("- a", ["not a mapping"]),
        ("time: 4 hours", ["site.yaml:1: time", "'4 hours'", "time limit of Slurm's, as 4:00:00"]),
    ],
)
def test_a_wrong_profile_says_where_and_what(text: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_profile(text, file="site.yaml")
    for word in ["site.yaml", *words]:
        assert word in str(caught.value)
