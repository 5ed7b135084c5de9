"""What an allocation's environment says of its nodes; Slurm's programs are scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.schedulers.slurm.allocation import Allocation, allocation_here, own_allocation

PLAIN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2"}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , "\\n"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_nodes() -> None:
    assert allocation_here({}) is None
    assert allocation_here(PLAIN) == Allocation("7", ("n1", "n2"))


def test_a_heterogeneous_job_is_refused() -> None:
    with pytest.raises(UsageError, match="job 7 is heterogeneous"):
        allocation_here(PLAIN | {"SLURM_HET_SIZE": "2"})


def test_what_a_job_has_left_in_a_shell(tmp_path: Path) -> None:
    """Where Slurm does not answer."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho no configuration >&2; exit 1\n")
    with pytest.raises(UnavailableError, match="SLURM_JOB_ID=7 says") as caught:
        allocation_here(PLAIN)
    assert "unset SLURM_JOB_ID" in str(caught.value)


def test_a_job_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Slurm answers, and steps of it would fail one by one."""
    squeue = tmp_path / "squeue"
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    squeue.touch(0o755)
    for script in ("echo '7|RUNNING|None|n[1-2]'", "echo 'no answer' >&2; exit 1"):
        squeue.write_text(f"#!/bin/sh\n{script}\n")
        assert own_allocation("r").job == "7"
    for script in (
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "echo '7|COMPLETED|None|n[1-2]'",
    ):
        squeue.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(UnavailableError, match=r"SLURM_JOB_ID=7 says .* has ended") as caught:
            own_allocation("r")
        assert "unset SLURM_JOB_ID" in str(caught.value)
