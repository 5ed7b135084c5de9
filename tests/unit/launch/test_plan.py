"""Plans are compared whole: what is not asked for must not be there either."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dni_runtime import __version__
from dni_runtime.errors import DataError
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.launch.plan import LaunchPlan
from dni_runtime.launch.restarts import RestartPlan
from dni_runtime.launch.runtimes import worker_argv
from dni_runtime.launch.settings import LaunchSettings, make_plan
from dni_runtime.spec import ChainSpec, DataSpec, WorkerSpec
from dni_runtime.wire import PROTOCOL_VERSION

RUN = Path("/runs/a b")
SOCKETS = Path("/run/user/1/dni-0")

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def plan_of(chain: ChainSpec, workers: tuple[WorkerSpec, ...], **where: object) -> LaunchPlan:
    settings = LaunchSettings(
        run=RUN, backend="process", sockets=SOCKETS, python="/usr/bin/python3"
    )
    return make_plan(chain, workers, replace(settings, **where))  # type: ignore[arg-type]


def test_processes(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    plan = plan_of(
        chain, workers, data=Path("/data/x"), attempt=3, resume="120", python_path="/lib/p"
    )
    assert (plan.run, plan.backend, plan.sockets) == (str(RUN), "process", str(SOCKETS))
    assert [worker.module for worker in plan.workers] == ["bottom", "middle", "top"]
    common = [
        *("--ipc", "/run/user/1/dni-0"),
        *("--attempt", "3", "--first", "3"),
        *("--resume", "120"),
    ]
    start = ["/usr/bin/python3", "-P", "-m", "dni_runtime.worker", "--run", "/runs/a b"]
    assert [worker_argv(worker) for worker in plan.workers] == [
        [*start, "--module", "bottom", *common, "--data", "/data/x"],
        [*start, "--module", "middle", *common],
        [*start, "--module", "top", *common],
    ]
    for worker in plan.workers:
        assert worker.environment == {
            **THREADS,
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": "/runs/a b/src:/lib/p",
            "DNI_STARTED_WITH": f"{__version__} {PROTOCOL_VERSION}",
        }
        assert worker.log == f"/runs/a b/logs/{worker.module}.3.log"
        assert (worker.attempt, worker.image, worker.mounts) == (3, None, ())


def test_threads_are_the_modules(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    several = (workers[0].model_copy(update={"cpus": 6}), *workers[1:])
    counts = [worker.environment["OMP_NUM_THREADS"] for worker in plan_of(chain, several).workers]
    assert counts == ["6", "1", "1"]


def test_containers(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    devices = ["cuda:1", "rocm", "cpu"]
    placed = tuple(
        worker.model_copy(update={"device": device})
        for worker, device in zip(workers, devices, strict=True)
    )
    extra = Mount("/scratch", "/scratch", read_only=False)
    plan = plan_of(
        chain,
        placed,
        backend="apptainer",
        tool=Apptainer(Path("/usr/bin/apptainer"), "apptainer", (1, 4, 5)),
        images={worker.module: Path(f"/img/{worker.module}.sif") for worker in workers},
        data=Path("/sets/a,b/x.npz"),
        files=[Path("/sets/a,b/x.npz")],
        mounts=(extra,),
    )
    start = ["/usr/bin/apptainer", "--quiet", "run", "--no-eval", "--no-home"]
    start += ["--no-mount", "cwd", "--pwd", "/"]

    def run(module: str) -> list[str]:
        """Its own files to read, folders to write to, and nothing else of the run."""
        read = [("container", ""), ("run.json", "/run.json")]
        read += [(path, f"/{path}") for path in (f"specs/{module}.json", "control")]
        folders = ("endpoints", "workers", "metrics", "checkpoints", "snapshots", "ledger")
        ways = [f"source=/runs/a b/{path},destination=/dni/run{to},ro" for path, to in read]
        ways += [f"source=/runs/a b/{name},destination=/dni/run/{name}" for name in folders]
        return [word for way in ways for word in ("--mount", f"type=bind,{way}")]

    sockets = ["--mount", "type=bind,source=/run/user/1/dni-0,destination=/dni/ipc"]
    data = ["--mount", 'type=bind,"source=/sets/a,b",destination=/dni/data,ro']
    scratch = ["--mount", "type=bind,source=/scratch,destination=/scratch"]

    def arguments(module: str) -> list[str]:
        return [
            *("--run", "/dni/run", "--module", module, "--ipc", "/dni/ipc"),
            *("--first", "1"),
        ]

    assert [worker_argv(worker) for worker in plan.workers] == [
        [
            *start, "--nv", *run("bottom"), *sockets, *data, *scratch, "/img/bottom.sif",
            *arguments("bottom"), "--data", "/dni/data/x.npz",
        ],
        [
            *start, "--rocm", *run("middle"), *sockets, *scratch, "/img/middle.sif",
            *arguments("middle"),
        ],
        [*start, *run("top"), *sockets, *scratch, "/img/top.sif", *arguments("top")],
    ]  # fmt: skip
    for worker in plan.workers:
        assert worker.environment == {**THREADS, "PYTHONFAULTHANDLER": "1"}
        assert worker.log == f"/runs/a b/logs/{worker.module}.1.log"
        assert worker.image == f"/img/{worker.module}.sif"


def test_a_container_sees_the_half_of_the_data_that_its_worker_reads(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...]
) -> None:
    where = {
        "backend": "apptainer",
        "tool": Apptainer(Path("/a"), "apptainer", (1, 4, 5)),
        "images": {worker.module: Path("/i.sif") for worker in workers},
        "data": Path("/hospital"),
        "labels": Path("/insurer/y.npz"),
        "files": [Path("/insurer/y.npz")],
    }
    tail = workers[-1].tail
    assert tail is not None
    halves = DataSpec.model_validate({"dataset": "npz", "labels": {"path": "/insurer/y.npz"}})
    for data, folder, path in (
        (None, None, None),
        (DataSpec.model_validate({"labels": "tail"}), "/hospital", "/dni/data"),
        (halves.of_labels, "/insurer", "/dni/data/y.npz"),
    ):
        last = workers[-1].model_copy(update={"tail": tail.model_copy(update={"labels": data})})
        plan = plan_of(chain, (*workers[:-1], last), **where)
        seen = [
            next((one.source for one in worker.mounts if one.target == "/dni/data"), None)
            for worker in plan.workers
        ]
        assert seen == ["/hospital", None, folder]
        argv = worker_argv(plan.workers[-1])
        assert argv[argv.index("--data") + 1 :] == [path] if path else "--data" not in argv


def test_a_container_gets_its_own_key_and_its_neighbours_public_ones(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...]
) -> None:
    chain = chain.model_copy(update={"links": chain.links.model_copy(update={"transport": "tcp"})})
    placed = (*workers[:2], workers[2].model_copy(update={"initial": True}))
    where = {
        "backend": "apptainer",
        "tool": Apptainer(Path("/a"), "apptainer", (1, 4, 5)),
        "images": {worker.module: Path("/i.sif") for worker in workers},
    }
    plan = plan_of(chain, placed, **where)
    seen = [
        {m.target.removeprefix("/dni/run/") for m in worker.mounts if m.read_only}
        for worker in plan.workers
    ]
    keys = [
        {"keys/bottom.key", "keys/bottom.pub", "keys/middle.pub"},
        {"keys/bottom.pub", "keys/middle.key", "keys/middle.pub", "keys/top.pub"},
        {"keys/middle.pub", "keys/top.key", "keys/top.pub"},
    ]
    assert [{name for name in one if name.startswith("keys/")} for one in seen] == keys
    assert ["initial/top.safetensors" in one for one in seen] == [False, False, True]
    by_hand = plan_of(chain, placed, **where, supervised=False)
    assert {m.target for worker in by_hand.workers for m in worker.mounts} == {
        "/dni/run", "/dni/ipc",
    }  # fmt: skip


def test_auto_device_may_use_a_gpu(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    plan = plan_of(
        chain,
        (workers[1].model_copy(update={"device": "auto"}),),
        backend="apptainer",
        tool=Apptainer(Path("/a"), "apptainer", (1, 4, 5)),
        images={"middle": Path("/img/m.sif")},
    )
    argv = worker_argv(plan.workers[0])
    assert "--nv" in argv
    assert "--rocm" not in argv


def test_same_arguments_same_plan(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    assert plan_of(chain, workers) == plan_of(chain, workers)


def test_json_round_trip(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    plan = plan_of(
        chain,
        workers,
        backend="apptainer",
        tool=Apptainer(Path("/a"), "apptainer", (1, 4, 5)),
        images={worker.module: Path("/i.sif") for worker in workers},
    )
    assert LaunchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_not_a_plan() -> None:
    with pytest.raises(DataError, match="not a launch plan: run: Field required"):
        LaunchPlan.from_json({"format": 3})
    with pytest.raises(DataError, match="not a launch plan of this version") as caught:
        LaunchPlan.from_json({"workers": [{"argv": []}]})
    assert "dnictl resume" in str(caught.value.hint)


@pytest.mark.parametrize("backend", ["process", "apptainer"])
def test_the_next_start_of_a_worker(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], backend: str
) -> None:
    where = {
        "backend": backend,
        "tool": Apptainer(Path("/usr/bin/apptainer"), "apptainer", (1, 4, 5)),
        "images": {name: Path(f"/images/{name}.sif") for name in ("bottom", "middle", "top")},
    }
    worker = plan_of(chain, workers, **where).workers[1]
    again = worker.again(4)
    assert again == replace(worker, attempt=4, log=f"{RUN}/logs/middle.4.log")
    words = iter(worker_argv(again))
    assert all(word in words for word in worker_argv(worker))
    assert {*worker_argv(again)} - {*worker_argv(worker)} == {"--attempt", "4"}
    together = again.again(5, resume="78")
    assert (together.resume, together.first) == ("78", 5)


def test_restarts_are_those_of_the_chain(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    plan = plan_of(chain, workers)
    rules = RestartPlan(policy="on-failure", limit=10, backoff_s=0.5, healthy_s=60)
    assert plan.restart == rules
    waits = (workers[0].model_copy(update={"max_late": 0}), *workers[1:])
    assert plan_of(chain, waits).restart == replace(rules, scope="chain")
