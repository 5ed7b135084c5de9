"""Plans are compared whole with files: what is not asked for must not be there either.

``DNI_WRITE_PLANS=1`` writes the files anew, for a reader of the difference.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import DataError
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.plan.settings import Site, StartRequest, StartSettings, make_plan
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.rundir import socket_path
from dni_runtime.schedulers import child
from dni_runtime.schedulers.schedulers import SCHEDULERS
from dni_runtime.schedulers.slurm import commands
from dni_runtime.spec import ChainSpec, DataSpec, LinksSpec, WorkerSpec
from dni_runtime.spec.profile import ProfileSpec
from dni_runtime.worker.start import this_version

GOLDEN = Path(__file__).parent / "plans"

SETTINGS = StartSettings(Path("/runs/a b"))
HERE = Site("process", sockets=Path("/run/user/1/dni-0"), python="/usr/bin/python3")
BOXES = replace(
    HERE,
    backend="apptainer",
    tool=Apptainer(Path("/usr/bin/apptainer"), "apptainer", (1, 4, 5)),
    images={name: Path(f"/img/{name}.sif") for name in ("bottom", "middle", "top")},
    data=Path("/sets/a,b/x.npz"),
    files=[Path("/sets/a,b/x.npz")],
    mounts=(Mount("/opt/site", "/opt/site", read_only=False),),
)

MakeWorker = Callable[..., WorkerSpec]


def _linked(chain: ChainSpec, **links: Any) -> ChainSpec:
    return chain.model_copy(update={"links": LinksSpec(**links)})


def processes(chain: ChainSpec, make: MakeWorker) -> StartRequest:
    """The third start of a run, from a cut, with some threads for its head."""
    workers = make(0, cpus=6), make(1), make(2)
    site = replace(HERE, data=Path("/data/x"), python_path="/lib/p", scratch="/scratch/1")
    return StartRequest(
        chain, workers, replace(SETTINGS, attempt=3, resume="120", log_level="debug"), site
    )


def containers(chain: ChainSpec, make: MakeWorker) -> StartRequest:
    """Each with its GPU and its keys; the tail reads labels of another owner."""
    bottom, middle, top = make(0, device="cuda:1"), make(1, device="rocm"), make(2, device="auto")
    assert top.tail is not None
    labels = DataSpec.model_validate({"dataset": "npz", "labels": {"path": "/insurer/y.npz"}})
    tail = top.tail.model_copy(update={"labels": labels.of_labels})
    top = top.model_copy(update={"tail": tail, "initial": True})
    chain = _linked(chain, transport="tcp").model_copy(update={"data": labels})
    site = replace(BOXES, files=[*BOXES.files, Path("/insurer/y.npz")])
    return StartRequest(chain, (bottom, middle, top), SETTINGS, site)


def by_hand(chain: ChainSpec, make: MakeWorker) -> StartRequest:
    """Containers that make their own files in the run directory; head and tail share their data."""
    bottom, middle, top = make(0), make(1), make(2)
    assert top.tail is not None
    data = DataSpec.model_validate({"labels": "tail"})
    top = top.model_copy(update={"tail": top.tail.model_copy(update={"labels": data.of_labels})})
    chain = chain.model_copy(update={"data": data})
    settings = replace(SETTINGS, by_hand=True, resume="own")
    return StartRequest(
        chain, (bottom, middle, top), settings, replace(BOXES, data=Path("/hospital"), files=())
    )


def hosts(chain: ChainSpec, make: MakeWorker) -> StartRequest:
    """Neighbours stay together; one module waits for its gradients, so all restart together."""
    workers = make(0).model_copy(update={"max_late": 0}), make(1), make(2)
    settings = replace(SETTINGS, scheduler="ssh", hosts=("a", "user@b"))
    return StartRequest(_linked(chain, interface="10.0.0.0/24"), workers, settings, HERE)


def job(chain: ChainSpec, make: MakeWorker) -> StartRequest:
    """Steps of a job on two nodes of a site that has settings of its own."""
    workers = make(0), make(1, device="cuda"), make(2)
    profile = ProfileSpec(
        interface="ib0", binds=("/site:ro",), container_args=("--writable-tmpfs",), gpu_type="a100"
    )
    record = JobRecord(job="7", nodes=(0, 1, 1), settings=profile, log_level="warning")
    settings = replace(SETTINGS, scheduler="slurm", job=record)
    return StartRequest(chain.model_copy(update={"infiniband": "off"}), workers, settings, BOXES)


def ranks(chain: ChainSpec, make: MakeWorker) -> StartRequest:
    """One command for all, with what any of them needs; where they will run is not known."""
    tops = [make(2).model_copy(update={"module": f"top.{n}", "replica": n}) for n in (1, 2)]
    tops = [one.model_copy(update={"replicas": 2, "backend": "gloo"}) for one in tops]
    workers = make(0), make(1, device="cuda"), *tops
    settings = replace(SETTINGS, scheduler="mpi", resume="40")
    return StartRequest(_linked(chain, interface="ib0"), workers, settings, BOXES)


CASES = (processes, containers, by_hand, hosts, job, ranks)


def _plain(document: Any) -> Any:
    """Return a document without what is not set."""
    if isinstance(document, dict):
        return {key: _plain(it) for key, it in document.items() if it not in (None, "", [], {})}
    return [_plain(it) for it in document] if isinstance(document, list) else document


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on two nodes."""
    said = {"scontrol": "n1\nn2\n", "squeue": "7|RUNNING|None|n[1-2]\n"}
    monkeypatch.setattr(commands, "run_slurm", lambda argv: (0, said[argv[0]], ""))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("DNI_SCRATCH", "/scratch/7")


@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_whole_plans(
    case: Callable[[ChainSpec, MakeWorker], StartRequest], chain: ChainSpec, make_worker: MakeWorker
) -> None:
    request = case(chain, make_worker)
    scheduler = SCHEDULERS[request.settings.scheduler]
    plan = scheduler.plan(request)
    assert LaunchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    document = _plain(plan.to_json())
    for worker, written in zip(plan.workers, document["workers"], strict=True):
        del written["by_rank"], written["overlaps"]
        written.pop("mounts", None)  # the command has them all
        written["command"] = shlex.join(scheduler.command(worker))
    text = json.dumps(document, indent=1) + "\n"
    sockets = socket_path(SETTINGS.run, Path("/tmp"))  # its name has the user's number
    for here, name in (
        (this_version(), "VERSION"),
        (sockets, "/tmp/SOCKETS"),
        (child.__file__, "CHILD"),
    ):
        text = text.replace(str(here), name)
    file = GOLDEN / f"{case.__name__}.json"
    if "DNI_WRITE_PLANS" in os.environ:
        file.write_text(text)
    assert json.loads(text) == json.loads(file.read_text())


def test_not_a_plan() -> None:
    with pytest.raises(DataError, match="not a launch plan: run: Field required"):
        LaunchPlan.from_json({"format": 3})
    with pytest.raises(DataError, match="not a launch plan of this version") as caught:
        LaunchPlan.from_json({"workers": [{"argv": []}]})
    assert "dnictl resume" in str(caught.value.hint)


@pytest.mark.parametrize("site", [HERE, BOXES])
def test_the_next_start_of_a_worker(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], site: Site
) -> None:
    worker = make_plan(StartRequest(chain, workers, SETTINGS, site)).workers[1]
    again = worker.restarted(4)
    assert again == replace(worker, attempt=4, log="/runs/a b/logs/middle.4.log")
    together = again.restarted(5, resume="78")
    assert (together.resume, together.first) == ("78", 5)
