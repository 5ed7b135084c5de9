"""What an allocation's environment says of its nodes; ``scontrol`` is a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.launch.slurm.allocation import Allocation, allocation_here, beside
from dni_runtime.launch.slurm.commands import component_jobs

PLAIN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2"}
HETEROGENEOUS = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n1,n2",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1,n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "g1",
}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , "\\n"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_nodes_and_their_components() -> None:
    assert allocation_here({}) is None
    assert allocation_here(PLAIN) == Allocation("7", ("n1", "n2"), (None, None))
    assert allocation_here(HETEROGENEOUS) == Allocation("7", ("n1", "n2", "g1"), (0, 0, 1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_HET_SIZE": "two"},
        {"SLURM_HET_SIZE": "1"},  # without the list of its nodes
        {"PATH": "none"},
    ],
)
def test_what_a_job_has_left_in_a_shell(
    wrong: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "PATH" in wrong:  # where Slurm does not answer
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho no configuration >&2; exit 1\n")
    with pytest.raises(UnavailableError, match="SLURM_JOB_ID=7 says") as caught:
        allocation_here(PLAIN | wrong)
    assert "unset SLURM_JOB_ID" in str(caught.value)


def test_a_step_says_its_component_only_where_there_are_several() -> None:
    assert "--het-group=1" in beside(["g1"], 1)
    assert not [word for word in beside(["n1"], None) if "het" in word]


def test_steps_are_looked_for_in_all_components() -> None:
    assert component_jobs({}) is None
    assert component_jobs(PLAIN) == "7"
    assert component_jobs(HETEROGENEOUS) == "7,8"
