"""Commands on runs of Slurm, whose programs are made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dni_runtime.launch.records import Record
from dni_runtime.launch.slurm.job import JobRecord
from tests.unit.cli.conftest import Dnictl, ended


def test_a_run_between_two_starts_of_its_job(
    dnictl: Dnictl, record: Record, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on: ``restart`` says that it waits, and ``--follow`` waits for its end."""
    ended(record, "stopped", 75)
    JobRecord("7", (0, 0), None, {}, "info", 0.0).write(record.run)
    (folder / "squeue").write_text(
        "#!/bin/sh\n"
        'if [ "$(cat answers)" -gt 0 ]; then echo "PENDING|BeginTime|"; fi\n'
        "echo $(($(cat answers) - 1)) >answers\n"
    )
    (folder / "sacct").write_text("#!/bin/sh\n")
    for name in ("squeue", "sacct"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    answers = folder / "answers"

    answers.write_text("1\n")
    result = dnictl("restart", "top")
    assert result.code == 64
    assert "'small-1' is queued" in result.err
    assert "dnictl status" in result.err

    monkeypatch.setattr("dnictl.tensorboard._POLL_S", 0.0)
    answers.write_text("2\n")
    assert dnictl("tensorboard", "--follow").code == 0
    assert int(answers.read_text()) < 0
