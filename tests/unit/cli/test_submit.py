"""``plan``, ``submit --dry-run`` and ``profile`` on a machine without Slurm; wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Dnictl

CHAIN = """\
name: mlp
data: {{dataset: digits, flatten: true}}
links: {{interface: ib0}}
defaults: {{resources: {{memory: 500M}}}}
placement: {placement}
modules:
  - name: bottom
    resources: {bottom}
    layers:
      - Linear: {{in_features: 64, out_features: 512}}
      - BatchNorm1d: {{num_features: 512}}
  - name: middle
    layers:
      - Linear: {{in_features: 512, out_features: 64}}
      - BatchNorm1d: {{num_features: 64}}
  - name: top
    resources: {top}
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own: no Slurm, no profiles."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DNICTL_PROFILE", raising=False)


def write(
    folder: Path, placement: str = "{nodes: 2}", bottom: str = "{cpus: 4}", top: str = "{}"
) -> None:
    text = CHAIN.format(placement=placement, bottom=bottom, top=top)
    (folder / "chain.yaml").write_text(text)


def test_plan_shows_where_modules_go(dnictl: Dnictl, folder: Path) -> None:
    write(folder)
    result = dnictl("plan", "--json")
    assert result.code == 0, result.err
    assert [(row["module"], row["node"], row["input"], row["cpus"]) for row in result.json] == [
        ("bottom", 0, "data", 4),
        ("middle", 1, "tcp on ib0", 1),
        ("top", 1, "ipc", 1),
    ]
    assert sum(row["work"] for row in result.json) == pytest.approx(1)
    assert "the nodes are not known here" in result.err


def test_the_command_lines_partition_is_taken(dnictl: Dnictl, folder: Path) -> None:
    write(folder)
    script = dnictl("submit", "--dry-run", "--backend", "process", "--partition", "p").out
    assert script.count("--partition=p") == 1


def test_measured_costs_count(dnictl: Dnictl, folder: Path) -> None:
    write(folder)
    costs = {"bottom": 1.0, "middle": 1.0, "top": 9.0}
    modules = [{"module": name, "step_us": {"median": us}} for name, us in costs.items()]
    (folder / "costs.json").write_text(json.dumps({"modules": modules}))
    rows = dnictl("plan", "--json", "--costs", "costs.json").json
    assert [row["node"] for row in rows] == [0, 0, 1]
    (folder / "costs.json").write_text(json.dumps({"modules": modules[:2]}))
    result = dnictl("plan", "--costs", "costs.json")
    assert result.code == 64
    assert "'top'" in result.err
    assert "dnictl bench module" in result.err


def test_dry_run_prints_the_script_and_writes_nothing(dnictl: Dnictl, folder: Path) -> None:
    write(folder)
    profiles = folder / "config" / "dnictl" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "site.yaml").write_text("account: abc\nprologue: module load x\n")
    result = dnictl("submit", "--dry-run", "--backend", "process", "--profile", "site")
    assert result.code == 0, result.err
    for line in ("#SBATCH --account=abc", "#SBATCH --nodes=2", "#SBATCH --cpus-per-task=4",
                 "#SBATCH --mem=1000M", "module load x"):  # fmt: skip
        assert line in result.out.splitlines()
    document = dnictl("submit", "--dry-run", "--json", "--backend", "process").json
    assert "#SBATCH --nodes=2" in document["script"].splitlines()
    assert [row["node"] for row in document["modules"]] == [0, 1, 1]
    assert document["slurm"] is None
    assert not (folder / "runs").exists()


def test_without_slurm_nothing_is_submitted(dnictl: Dnictl, folder: Path) -> None:
    write(folder)
    result = dnictl("submit", "--backend", "process")
    assert result.code == 69
    assert "'sinfo' cannot be run" in result.err
    assert not (folder / "runs").exists()


def test_profiles(dnictl: Dnictl, folder: Path) -> None:
    assert list(dnictl("profile", "list", "--json").json) == ["example"]
    assert "account: my-project" in dnictl("profile", "show", "example").out
    result = dnictl("profile", "show", "exmaple")
    assert result.code == 64
    assert "did you mean 'example'?" in result.err


@pytest.mark.parametrize("line", ["dnictl profile show ex", "dnictl submit --profile ex"])
def test_names_of_profiles_are_completed(
    line: str, dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DNICTL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", "3")
    assert dnictl().out == "plain,example\n"


def test_one_format_at_a_time(dnictl: Dnictl, folder: Path) -> None:
    write(folder)
    result = dnictl("submit", "--parsable", "--json", "--backend", "process")
    assert result.code == 64
    assert "--parsable and --json" in result.err


@pytest.mark.parametrize(
    ("settings", "options", "code", "words"),
    [
        ({}, ["--nodes", "9"], 64, ["9 nodes", "3 modules"]),
        ({"placement": "{map: {bottom: 0}}"}, [], 78, ["'map' and 'strategy: explicit'"]),
        (
            {"placement": "{strategy: explicit, map: {bottom: 0, midle: 1, top: 1}}"},
            [],
            78,
            ["'midle'", "bottom, middle, top"],
        ),
        (
            {"placement": "{strategy: explicit, map: {bottom: 0, top: 1}}"},
            [],
            78,
            ["does not place module 'middle'"],
        ),
        ({"placement": "{strategy: tight}"}, [], 78, ["'tight'", "packed"]),
        ({"bottom": "{memory: 3 GB}"}, [], 78, ["resources.memory", "3 GB"]),
        ({"bottom": "{gpu: 1}"}, [], 78, ["unknown key 'gpu'", "gpus"]),
    ],
)
def test_wrong_input_says_what_and_where(
    dnictl: Dnictl, folder: Path, settings: dict[str, str], options: list[str], code: int,
    words: list[str],
) -> None:  # fmt: skip
    write(folder, **settings)
    result = dnictl("submit", "--dry-run", "--backend", "process", *options)
    assert result.code == code, result.err
    for word in words:
        assert word in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("links: {interface: ib0}", "links: {transport: ipc}", ["'bottom' and 'middle'", "ipc"]),
        ("links: {interface: ib0}\n", "", ["no network interface is set", "site profile"]),
        ("resources: {cpus: 4}", "cpus: 2\n    resources: {cpus: 4}", ["cpus 2 contradicts"]),
    ],
)
def test_links_and_cpus_that_cannot_be(
    dnictl: Dnictl, folder: Path, old: str, new: str, words: list[str]
) -> None:
    write(folder)
    path = folder / "chain.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    result = dnictl("plan")
    assert result.code == 78
    for word in words:
        assert word in result.err
