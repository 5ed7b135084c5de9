"""Reading what Slurm prints."""

from __future__ import annotations

import pytest

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.schedulers.slurm.commands import (
    JobInfo,
    NodeShape,
    parse_jobs,
    parse_sinfo,
    parse_steps,
    run_slurm,
)


@pytest.mark.parametrize(
    ("line", "info"),
    [
        ("7|PENDING|Resources|\n", JobInfo("PENDING", "Resources", "")),
        ("7|RUNNING|None|n[1-3]\n", JobInfo("RUNNING", "", "n[1-3]")),
        ("7|TIMEOUT|TimeLimit|n1\n", JobInfo("TIMEOUT", "TimeLimit", "n1")),
        ("7|REQUEUED|None|n1\n7|CANCELLED by 1001|None|n[1-2]\n",
         JobInfo("CANCELLED", "", "n[1-2]")),
        ("7|PENDING|None|None assigned\n", JobInfo("PENDING", "", "")),
    ],
)  # fmt: skip
def test_one_job(line: str, info: JobInfo) -> None:
    assert parse_jobs(line) == {"7": info}


def test_several_jobs() -> None:
    found = parse_jobs("7|RUNNING|None|n1\n\n8|PENDING|Priority|\n")
    assert found == {"7": JobInfo("RUNNING", "", "n1"), "8": JobInfo("PENDING", "Priority", "")}


@pytest.mark.parametrize(
    ("state", "alive", "pending"),
    [
        ("PENDING", True, True),
        ("REQUEUED", True, True),
        ("RUNNING", True, False),
        ("COMPLETING", False, False),
        ("NODE_FAIL", False, False),
    ],
)
def test_states(state: str, alive: bool, pending: bool) -> None:
    assert (JobInfo(state).alive, JobInfo(state).pending) == (alive, pending)


SINFO = """\
batch*|10|64|256000|gpu:a100:4(S:0-1),craynetwork:2
batch*|2|128|512000+|(null)
debug|1|8|16000|gpu:2
"""


def test_sinfo() -> None:
    assert parse_sinfo(SINFO, None) == [NodeShape(10, 64, 256000, 4), NodeShape(2, 128, 512000, 0)]
    assert parse_sinfo(SINFO, "debug") == [NodeShape(1, 8, 16000, 2)]
    with pytest.raises(UsageError, match="no partition 'gpu'") as caught:
        parse_sinfo(SINFO, "gpu")
    assert "batch, debug" in str(caught.value)
    both = parse_sinfo(SINFO, "debug,batch")
    assert [shape.partition for shape in both] == ["batch", "batch", "debug"]
    with pytest.raises(UsageError, match="no partition 'gpu'"):
        parse_sinfo(SINFO, "batch,gpu")


def test_steps() -> None:
    out = "7.batch|batch\n7.10|top\n7.9|top\n7.0|bottom\n7.extern|extern\n"
    assert parse_steps(out) == {"bottom": "7.0", "top": "7.10"}


def test_a_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnavailableError, match="'sbatch' cannot be run"):
        run_slurm(["sbatch"])
