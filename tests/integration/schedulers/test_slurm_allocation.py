"""What an allocation's environment says of its nodes; ``scontrol`` is a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.schedulers.slurm.allocation import Allocation, allocation_here

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
