"""The batch script and its steps: properties that sites and Slurm rely on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import UsageError
from dni_runtime.plan.plan import Need, WorkerPlan
from dni_runtime.schedulers.runtimes import worker_argv
from dni_runtime.schedulers.slurm.commands import NodeShape
from dni_runtime.schedulers.slurm.script import JobRequest, directives, render_script
from dni_runtime.schedulers.slurm.steps import step_args, step_argv, step_environment
from dni_runtime.schedulers.slurm.submit import check_room
from dni_runtime.spec.profile import ProfileSpec

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
        "--job-name=a_b",
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


def test_a_job_is_in_one_of_its_partitions() -> None:
    one, two = (NodeShape(1, 8, 9999, 0, partition) for partition in ("a", "b"))
    check_room(REQUEST, [one, two, two])
    with pytest.raises(UsageError, match="a,b has 1 such nodes"):
        check_room(with_profile(partition="a,b"), [one, two])


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("1", 60), ("1:00", 60), ("0:59", 60), ("60", 3600), ("1:00:00", 3600), ("2-3", 183600),
        ("1-0:1", 86460), ("0-0:0:61", 120), ("0", None), ("0:00:00", None), ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_a_time_limit_leaves_time_to_train(limit: str, seconds: int | None) -> None:
    enough = with_profile(time=limit)
    if seconds is None:
        directives(replace(enough, stop_grace_s=1e9))
        return
    assert f"--time={limit}" in directives(replace(enough, stop_grace_s=seconds - 31))
    with pytest.raises(UsageError, match=f"are told to stop {seconds} s before") as caught:
        directives(replace(enough, stop_grace_s=seconds - 30))
    assert "1:00:00 is an hour" in str(caught.value)


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
    assert request.idle_gpus == 0
    assert replace(request, nodes=(0, 0, 1)).idle_gpus == 3, "the second node gets as many"


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


def test_steps_of_a_job_that_has_been_resized_ask_for_no_cpus() -> None:
    argv = step_argv(step(REQUEST.needs[0], node="n4", overlaps=True))
    assert {"--overlap", "--mem=1000M"} <= {*argv}
    assert not any(one.startswith(("--exact", "--cpus-per-task")) for one in argv)


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
