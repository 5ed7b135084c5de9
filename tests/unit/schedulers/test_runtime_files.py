"""What is made for workers before they start: here, for those in containers."""

from __future__ import annotations

import stat
from pathlib import Path

from dni_runtime.files import read_json, write_json
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.plan.settings import Site, StartRequest, StartSettings, make_plan
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.schedulers.runtime_files import prepare_runtime_files, remove_runtime_files


def test_what_containers_see_is_there_to_be_mounted(
    record: Record, prepared: CheckedChain, tmp_path: Path
) -> None:
    run, sockets = record.run, tmp_path / "ipc"
    links = prepared.chain.links.model_copy(update={"transport": "tcp"})
    images = {name: Path(f"/{name}.sif") for name in record.modules}
    site = Site(
        "apptainer",
        sockets=sockets,
        tool=Apptainer(Path("/apptainer"), "apptainer", (1, 4, 5)),
        images=images,
    )
    chain = prepared.chain.model_copy(update={"links": links})
    plan = make_plan(StartRequest(chain, prepared.workers, StartSettings(run.root), site))
    for _start in range(2):
        prepare_runtime_files(run, plan)
        for mount in (mount for worker in plan.workers for mount in worker.mounts):
            if mount.target != "/dni/ipc":
                point = run.container.root / mount.target.removeprefix("/dni/run").strip("/")
                assert Path(mount.source).is_dir() == point.is_dir()
                assert Path(mount.source).is_file() == point.is_file()
        assert stat.S_IMODE(run.container.keys.stat().st_mode) == 0o700
        assert not any(path.stat().st_size for path in run.container.root.rglob("*.key"))
        RunState.begin("apptainer", 1, record.modules).save(run)
        assert read_json(run.container.state) == read_json(run.state)
        remove_runtime_files(run, sockets)
        assert not run.keys.exists()


def test_groups_of_a_start_before_are_forgotten(record: Record, plan: LaunchPlan) -> None:
    run = record.run
    for forget in (
        lambda: prepare_runtime_files(run, plan),
        lambda: remove_runtime_files(run, Path(plan.sockets)),
    ):
        (run.group("middle") / "1").mkdir(parents=True)
        forget()
        assert not run.groups


def test_a_request_to_stop_that_is_newer_than_the_last_start_counts(
    record: Record, plan: LaunchPlan
) -> None:
    """It came while this start was on its way: nobody had written a state yet."""
    record.run.create()
    write_json(record.run.stop_request, {"time": 0})
    prepare_runtime_files(record.run, plan)
    assert record.run.stop_request.exists()
    write_json(record.run.state, {})  # the start that it ended
    prepare_runtime_files(record.run, plan)
    assert not record.run.stop_request.exists()
