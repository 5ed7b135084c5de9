"""``plan``, ``submit --dry-run`` and ``profile`` on a machine without Slurm; wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Dnictl

CHAIN = """\
name: mlp
data: {dataset: digits, flatten: true}
links: {interface: ib0}
defaults: {resources: {memory: 500M}}
placement: {nodes: 2}
modules:
  - name: bottom
    resources: {cpus: 4}
    layers:
      - Linear: {in_features: 64, out_features: 512}
      - BatchNorm1d: {num_features: 512}
  - name: middle
    layers:
      - Linear: {in_features: 512, out_features: 64}
      - BatchNorm1d: {num_features: 64}
  - name: top
    layers: [{Linear: {in_features: 64, out_features: 10}}]
"""


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own: no Slurm, no profiles."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DNICTL_PROFILE", raising=False)


def write(folder: Path, old: str = "", new: str = "") -> None:
    assert old in CHAIN
    (folder / "chain.yaml").write_text(CHAIN.replace(old, new, 1))


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


def test_settings_of_the_command_line_override_the_profiles(dnictl: Dnictl, folder: Path) -> None:
    write(folder)
    profiles = folder / "config" / "dnictl" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "site.yaml").write_text("{partition: q, account: a, time: '10', qos: low}")
    command = ("submit", "--dry-run", "--backend", "process", "--profile", "site", "--name", "one")
    given = ("--partition", "p", "--account", "b", "--time", "1-0")
    lines = dnictl(*command, *given).out.splitlines()
    assert [line.removeprefix("#SBATCH --") for line in lines[1:6]] == [
        "job-name=one", "account=b", "partition=p", "qos=low", "time=1-0",
    ]  # fmt: skip
    result = dnictl(*command, "--time", "4 hours")
    assert result.code == 64
    assert "--time: '4 hours' is not a time limit of Slurm's, as 4:00:00" in result.err


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


def test_profiles(dnictl: Dnictl, folder: Path) -> None:
    assert list(dnictl("profile", "list", "--json").json) == ["example"]
    assert "account: my-project" in dnictl("profile", "show", "example").out


@pytest.mark.parametrize("line", ["dnictl profile show ex", "dnictl submit --profile ex"])
def test_names_of_profiles_are_completed(
    line: str, dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DNICTL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", "3")
    assert dnictl().out == "plain,example\n"


SUBMIT = ("submit", "--backend", "process")
PLACED = "placement: {nodes: 2}"
CPUS = "resources: {cpus: 4}"
MAPPED = "placement: {strategy: explicit, map: {bottom: 0, "

# What to change in the chain and into what, the command, its exit code, and its message.
WRONG = [
    ("", "", SUBMIT, 69, ["'sinfo' cannot be run"]),
    ("", "", (*SUBMIT, "--parsable", "--json"), 64, ["--parsable and --json"]),
    ("", "", ("profile", "show", "exmaple"), 64, ["did you mean 'example'?"]),
    ("", "", (*SUBMIT, "--dry-run", "--nodes", "9"), 64, ["9 nodes", "3 modules"]),
    (PLACED, "placement: {map: {bottom: 0}}", ("plan",), 78, ["'map' and 'strategy: explicit'"]),
    (PLACED, MAPPED + "midle: 1, top: 1}}", ("plan",), 78, ["'midle'", "bottom, middle, top"]),
    (PLACED, MAPPED + "top: 1}}", ("plan",), 78, ["does not place module 'middle'"]),
    (PLACED, "placement: {strategy: tight}", ("plan",), 78, ["'tight'", "packed"]),
    (CPUS, "resources: {memory: 3 GB}", ("plan",), 78, ["resources.memory", "3 GB"]),
    (CPUS, "resources: {gpu: 1}", ("plan",), 78, ["unknown key 'gpu'", "gpus"]),
    (CPUS, "device: cuda:1", ("plan",), 64, ["'cuda:1'", "the 1 GPUs", "write 'device: cuda'"]),
    (CPUS, f"cpus: 2\n    {CPUS}", ("plan",), 78, ["cpus 2 contradicts"]),
    ("{interface: ib0}", "{transport: ipc}", ("plan",), 78, ["'bottom' and 'middle'", "ipc"]),
    ("links: {interface: ib0}\n", "", ("plan",), 78, ["no network interface is", "site profile"]),
]


@pytest.mark.parametrize(("old", "new", "command", "code", "words"), WRONG)
def test_wrong_input_says_what_and_where(
    old: str, new: str, command: tuple[str, ...], code: int, words: list[str],
    dnictl: Dnictl, folder: Path,
) -> None:  # fmt: skip
    write(folder, old, new)
    result = dnictl(*command)
    assert (result.code, result.out) == (code, ""), result.err
    for word in words:
        assert word in result.err
    assert "Traceback" not in result.err
    assert not (folder / "runs").exists()
