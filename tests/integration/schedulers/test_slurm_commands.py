"""What Slurm's programs do; they are scripts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.state import RunPhase, RunState
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.slurm.commands import (
    UncertainError,
    check_only,
    node_shapes,
    submit,
)
from dni_runtime.schedulers.slurm.scheduler import Slurm


def test_a_controller_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "sinfo"
    program.write_text(
        "#!/bin/sh\necho 'sinfo: error: a' >&2\necho 'sinfo: fatal: no source' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="sinfo failed: fatal: no source") as caught:
        node_shapes(None)
    assert "scontrol ping" in str(caught.value)


@pytest.mark.parametrize(
    ("squeue", "expected"),
    [
        ("echo '7 /other/job.sbatch'; echo '8 /run/job.sbatch'; echo '9 /run/job.sbatch'", "9"),
        ("echo '8 /run/job.sbatch'", UsageError),
        ("exit 1", UncertainError),
    ],
)
def test_an_answer_that_comes_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, expected: object
) -> None:
    """The controller may have the job all the same; no controller is late when a test wants it."""
    late = "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1"
    for name, body in {"sbatch": late, "squeue": squeue}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if isinstance(expected, type):
        with pytest.raises(expected, match="Socket timed out"):
            submit(Path("/run/job.sbatch"), former="8")
    else:
        assert submit(Path("/run/job.sbatch"), former="8") == expected


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="sbatch is not installed")
def test_what_a_script_says_counts_before_the_shells_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's own program prints what it asks for, before it looks for a controller in vain."""
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n"
        "AuthType=auth/none\nMessageTimeout=1\nNodeName=localhost\nPartitionName=any Nodes=ALL\n"
    )
    script = tmp_path / "job.sbatch"
    script.write_text(
        '#!/bin/bash\n#SBATCH --partition=ours\n\n#SBATCH --output="/a b/%%.log" # a log\n'
        "#SBATCH --time=1:00:00\n#SBATCH --mem=100M\n#SBATCH --requeue\n\n"
        "module load x\n#SBATCH --qos=late\n"
    )
    variables = {"PARTITION": "theirs", "TIMELIMIT": "5", "MEM_PER_CPU": "7", "ACCOUNT": "me",
                 "NO_REQUEUE": "1", "QOS": "shell", "DEBUG": "1"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(UsageError) as caught:
        check_only(script, ["--dependency=afterok:1"])
    told = dict(line.split(":", 1) for line in caught.value.message.split("; ") if " : " in line)
    said = {name.strip(): value.strip() for name, value in told.items()}
    assert said.items() >= {
        "partition": "ours", "time": "01:00:00", "requeue": "requeue",
        "output": "/a b/%%.log", "account": "me", "qos": "shell", "dependency": "afterok:1",
    }.items()  # fmt: skip
    assert "mem-per-cpu" not in said
    script.write_text('#!/bin/bash\n#SBATCH --comment="a\n')
    with pytest.raises(UsageError, match="is no directive: No closing quotation"):
        submit(script)


def test_programs_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may have the job: its run's directory must stay."""
    monkeypatch.setattr(submit.__globals__["run_slurm"], "__kwdefaults__", {"timeout_s": 0.3})
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 20\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UncertainError, match="'sbatch' did not respond within"):
        submit(Path("/run/job.sbatch"))
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '9 /run/job.sbatch'\n")
    assert submit(Path("/run/job.sbatch")) == "9"


@pytest.mark.parametrize("phase", ["failed", "stopped"])
def test_a_job_that_is_to_resume_a_run(
    phase: RunPhase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the run has ended before is no news, whatever Slurm says or does not say."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run, squeue = RunDir(tmp_path / "run"), tmp_path / "squeue"
    run.root.mkdir()
    ended = RunState(phase=phase, attempt=1, exit_code=74, error="full", modules={})
    for after, script, meaning in (
        (0, "exit 1", phase),  # its own job
        (1, "echo '12|PENDING|Resources|'", "queued"),
        (1, "echo '12|RUNNING|None|n1'", "starting"),
        (1, "exit 1", "queued"),
        (1, "echo '12|NODE_FAIL|None|n1'", "lost"),
    ):
        squeue.write_text(f"#!/bin/sh\n{script}\n")
        squeue.chmod(0o755)
        JobRecord(job="12", nodes=(0,), after=after).write(run.job)
        (state,) = Slurm().describe([run], [ended])
        assert state.phase == meaning
        assert state.active == (after == 1 and meaning != "lost")
    squeue.write_text("#!/bin/sh\nexit 1\n")
    (state,) = Slurm().describe([run], [RunState(modules={})])
    assert (state.phase, state.error) == ("queued", "job 12 waits: Slurm does not answer")
    squeue.write_text("#!/bin/sh\necho '12|CANCELLED|None|'\n")
    run.stop_request.parent.mkdir(exist_ok=True)
    run.stop_request.touch()
    assert Slurm().describe([run], [ended]) == [ended]
