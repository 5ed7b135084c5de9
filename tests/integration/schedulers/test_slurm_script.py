"""The batch script and the shell of a step, run by bash."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dni_runtime.schedulers.runtimes import on_node
from dni_runtime.schedulers.slurm.script import render_script
from dni_runtime.spec.profile import ProfileSpec
from tests.conftest import eventually
from tests.unit.schedulers.slurm.test_script import REQUEST, step, with_profile


def test_the_steps_shell_makes_private_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shell(sockets: Path, scratch: str = "") -> subprocess.CompletedProcess[str]:
        worker = step(
            REQUEST.needs[0], ipc=str(sockets), scratch=scratch, python="echo", data="a  b"
        )
        return subprocess.run(on_node(worker), capture_output=True, text=True)

    done = shell(tmp_path / "s s", str(tmp_path / "t"))
    assert done.returncode == 0
    assert done.stdout.endswith("--data a  b\n")
    assert (tmp_path / "s s").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "t").is_dir()
    (tmp_path / "open").mkdir(mode=0o777)
    assert shell(tmp_path / "open").returncode == 0
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert shell(tmp_path / "link").returncode == 69
    assert shell(tmp_path / "s s", "/tmp").returncode == 0  # root's
    stat = tmp_path / "stat"  # as if somebody else had made it
    stat.write_text("#!/bin/sh\necho 12345\n")
    stat.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = shell(tmp_path / "s s", str(tmp_path / "t"))
    assert (done.returncode, done.stdout) == (69, "")
    assert f"the folder {tmp_path / 't'} cannot be made, or belongs to another user" in done.stderr


def test_the_script_is_sound_bash_and_quotes() -> None:
    script = render_script(
        with_profile(prologue="module load apptainer\nexport A='b c'", scratch="$TMPDIR/dni")
    )
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    # sbatch reads directives only before the first command
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert "set -euo pipefail" in lines
    assert "run='/runs/a b'" in lines
    assert f"export PYTHONPATH={shlex.quote(REQUEST.python_path)}" in lines
    assert "'/opt/my env/bin/python' -P -m dnictl supervise --trust \"$run\" &" in script
    assert 'export DNI_SCRATCH="$TMPDIR/dni"' in lines
    assert lines.index("export A='b c'") < lines.index("run='/runs/a b'")
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "-s", "bash", "-"], input=script, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def run_script(tmp_path: Path, *, code: int, state: str = "RUNNING", **more: str) -> str:
    """Run the script with a supervisor that only exits; gives what scontrol was told."""
    tools = tmp_path / "bin"
    tools.mkdir()
    told = tmp_path / "told"
    told.write_text("")
    for name, body in {
        "python": f"exit {code}",
        "squeue": f"echo {state}",
        "scontrol": f'echo "$@" >>{told}',
        "sleep": "exit 0",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    request = replace(
        REQUEST, run=tmp_path, python=str(tools / "python"), profile=ProfileSpec(max_requeues=2)
    )
    environ = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **more}
    done = subprocess.run(["bash", "-c", render_script(request)], env=environ, timeout=20)
    assert done.returncode == code
    return told.read_text().strip()


@pytest.mark.parametrize(
    ("code", "stopped", "more", "told"),
    [
        (75, False, {"SLURM_RESTART_COUNT": "1"}, "requeue 7"),
        (75, False, {"SLURM_RESTART_COUNT": "2"}, ""),  # not for ever
        (75, True, {}, ""),  # somebody has stopped it
        (75, False, {"state": "COMPLETING"}, ""),  # it was cancelled
        (0, False, {}, ""),
        (70, False, {}, ""),
    ],
)
def test_whether_a_job_goes_on_by_itself(
    tmp_path: Path, code: int, stopped: bool, more: dict[str, str], told: str
) -> None:
    if stopped:
        (tmp_path / "stop.json").write_text("{}")
    assert run_script(tmp_path, code=code, **more) == told


def test_a_supervisor_that_could_not_listen_yet_has_lost_nothing(tmp_path: Path) -> None:
    """TERM comes while it still imports: Python ends by it."""
    listens = f"touch {tmp_path}/begun; exec sleep 30"
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").write_text(f"#!/bin/sh\n{listens}\n")
    (tools / "squeue").write_text("#!/bin/sh\necho RUNNING\n")
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/told\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    request = replace(
        REQUEST, run=tmp_path, python=str(tools / "python"), profile=ProfileSpec(max_requeues=2)
    )
    script = render_script(request).replace("&& sleep 60", "")
    environ = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", script], env=environ)
    try:
        eventually("it begins", (tmp_path / "begun").exists, 10, every_s=0.01)
        job.terminate()
        assert job.wait(10) == 75
        assert (tmp_path / "told").read_text() == "requeue 7\n"
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize(("killed", "starts", "code"), [(2, 3, 0), (9, 6, 137)])
def test_a_supervisor_that_was_killed_is_started_again(
    tmp_path: Path, killed: int, starts: int, code: int
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/starts\n'
        f'[ "$(wc -l <{tmp_path}/starts)" -gt {killed} ] || kill -KILL $$\n'
    )
    python.chmod(0o755)
    script = render_script(replace(REQUEST, run=tmp_path, python=str(python)))
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", script], env=environ, timeout=20, capture_output=True)
    assert done.returncode == code
    started = f"-P -m dnictl supervise --trust {tmp_path}\n"
    assert (tmp_path / "starts").read_text() == started * starts
    assert b"restarted (2 of at most 5)" in done.stderr
