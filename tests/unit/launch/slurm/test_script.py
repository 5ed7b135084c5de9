"""The batch script and its steps: properties that sites and Slurm rely on."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import UsageError
from dni_runtime.launch.plan import Need, WorkerPlan
from dni_runtime.launch.runtimes import on_node, worker_argv
from dni_runtime.launch.slurm.script import (
    JobRequest,
    directives,
    render_script,
)
from dni_runtime.launch.slurm.steps import step_args, step_argv, step_environment
from dni_runtime.spec.profile import ProfileSpec
from tests.conftest import eventually

REQUEST = JobRequest(
    run=Path("/runs/a b"),
    chain="digits",
    needs=(Need("bottom", 2, 0, 1000), Need("middle", 1, 0, 500), Need("top", 4, 0, 3000)),
    nodes=(0, 0, 1),
    stop_grace_s=12.5,
    python="/opt/my env/bin/python",
    python_path="/src/it's",
)


def with_profile(**settings: object) -> JobRequest:
    return replace(REQUEST, profile=ProfileSpec.model_validate(settings))


def test_each_node_gets_what_the_fullest_needs() -> None:
    lines = directives(REQUEST)
    assert lines[:5] == [
        "--job-name=dni-digits",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--mem=3000M",
    ]
    assert "--open-mode=append" in lines
    assert "--requeue" in lines
    assert "--signal=B:TERM@43" in lines
    assert '--output="/runs/a b/logs/supervisor.log"' in lines
    assert not any("gpu" in line for line in lines)


def test_a_job_of_several_nodes_outlives_one_of_them() -> None:
    assert "--no-kill" in directives(REQUEST)
    assert "--job-name=.watch" in render_script(REQUEST)
    one = replace(REQUEST, nodes=(0, 0, 0))
    assert "--no-kill" not in directives(one)
    assert ".watch" not in render_script(one)
    assert ".watch" not in render_script(with_profile(suppress=["no-kill"]))


def test_a_profile_adds_and_suppresses() -> None:
    lines = directives(
        with_profile(
            account="abc", partition="batch", qos="low", constraint="a&b", reservation="r",
            time="10", directives=["--mail-type=FAIL"], suppress=["mem", "ntasks-per-node"],
        )
    )  # fmt: skip
    for one in ("--account=abc", "--partition=batch", "--qos=low", "--constraint=a&b",
                "--reservation=r", "--time=10", "--mail-type=FAIL"):  # fmt: skip
        assert one in lines
    assert not any(line.startswith(("--mem", "--ntasks")) for line in lines)
    given = replace(with_profile(partition="batch", time="10"), partition="gpu", time="20")
    assert {"--partition=gpu", "--time=20"} <= set(directives(given))


def step(need: Need, **fields: Any) -> WorkerPlan:
    """The plan of a module's worker in the job."""
    worker = WorkerPlan("/run", need.module, ipc="/tmp/s", log="/log", node="n1", need=need)
    return replace(worker, **fields)


@pytest.mark.parametrize(
    ("style", "job", "of_step"),
    [
        ("gres", "--gres=gpu:a100:3", "--gres=gpu:a100:1"),
        ("gpus-per-task", "--gpus-per-task=a100:3", "--gpus-per-task=a100:1"),
        ("gpus-per-node", "--gpus-per-node=a100:3", "--gpus-per-node=a100:1"),
    ],
)
def test_gpus_in_the_sites_style(style: str, job: str, of_step: str) -> None:
    profile = ProfileSpec.model_validate({"gpu_request": style, "gpu_type": "a100"})
    needs = (Need("a", 1, 1, 10), Need("b", 1, 2, 10), Need("c", 1, 0, 10))
    request = replace(REQUEST, needs=needs, nodes=(0, 0, 0), profile=profile)
    assert job in directives(request)

    def options(need: Need) -> list[str]:
        return step_argv(step(need, scheduler_args=step_args(need, profile=profile, any_gpus=True)))

    assert of_step in options(needs[0])
    # without it a step inherits the job's GPUs
    assert "--gres=none" in options(needs[2])


def test_a_step_takes_its_share_and_no_more() -> None:
    worker = step(REQUEST.needs[0], node="n2", ipc="/tmp/dni-1", scratch="/scratch/1")
    argv = step_argv(worker)
    assert argv[0] == "srun"
    shell = argv.index("/bin/sh")
    assert set(argv[1:shell]) == {
        "--job-name=bottom", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--exact",
        "--cpus-per-task=2", "--mem=1000M", "--input=none", "--export=ALL",
    }  # fmt: skip
    rest = ["dni-step", "/tmp/dni-1", "/scratch/1", *worker_argv(worker)]
    assert argv[shell + 3 :] == rest


def test_steps_on_a_node_that_the_job_has_gained_share_it() -> None:
    argv = step_argv(step(REQUEST.needs[0], node="n4", gained=True))
    assert {"--overlap", "--mem=1000M"} <= {*argv}
    assert not any(one.startswith(("--exact", "--cpus-per-task")) for one in argv)


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


def test_a_job_that_was_stopped_goes_on_by_itself(tmp_path: Path) -> None:
    assert run_script(tmp_path, code=75, SLURM_RESTART_COUNT="1") == "requeue 7"


def test_but_not_for_ever(tmp_path: Path) -> None:
    assert run_script(tmp_path, code=75, SLURM_RESTART_COUNT="2") == ""


def test_nor_when_somebody_stopped_it(tmp_path: Path) -> None:
    (tmp_path / "stop.json").write_text("{}")
    assert run_script(tmp_path, code=75) == ""


def test_nor_when_it_was_cancelled(tmp_path: Path) -> None:
    assert run_script(tmp_path, code=75, state="COMPLETING") == ""


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


@pytest.mark.parametrize("code", [0, 70])
def test_nor_when_it_has_ended(tmp_path: Path, code: int) -> None:
    assert run_script(tmp_path, code=code) == ""


def test_a_path_that_cannot_stand_in_a_directive_is_refused() -> None:
    with pytest.raises(UsageError, match="is not usable in a batch script"):
        render_script(replace(REQUEST, run=Path('/runs/a"b')))
    assert '--output="/runs/100%%/logs/supervisor.log"' in directives(
        replace(REQUEST, run=Path("/runs/100%"))
    )


def test_steps_do_not_inherit_the_jobs_request() -> None:
    environ = {
        "SLURM_JOB_ID": "1", "SLURM_CONF": "/c", "PATH": "/bin", "SBATCH_X": "1",
        "SLURM_MEM_PER_CPU": "5", "SLURM_GPUS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS": "2", "SLURM_HINT": "nomultithread",
        "SLURM_CPU_BIND": "verbose,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1",
    }  # fmt: skip
    assert set(step_environment(environ)) == {"SLURM_JOB_ID", "SLURM_CONF", "PATH"}
