"""Which worker a process of mpirun or srun is, and how those processes end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dni_runtime.errors import DataError, ImageError, UsageError
from dni_runtime.files import write_atomic
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.documents.reports import ChainStart, Report
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.options import JOB_INDEX, by_rank, chain_start, load_spec, worker_of_rank
from dni_runtime.worker.start import WorkerStart
from tests.unit.worker.test_resume import workers as specs_of

WORKERS = ["bottom", "middle.1", "middle.2", "top"]
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # in a batch script, beside its mpirun


@pytest.mark.parametrize(
    "environ",
    [
        # as Open MPI 4.1, MPICH 4.0 and Slurm 22.05 set them
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "2"},
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", **SLURM},
        {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"},
        {"PMI_RANK": "2", "PMI_SIZE": "4", **SLURM, "PMIX_RANK": "0"},
        {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4"},
        {"SLURM_PROCID": "2", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "4"},
        {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "2"},
        {"PMIX_RANK": "2", **SLURM},
        {"JOB_COMPLETION_INDEX": "2"},
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_a_rank_is_a_place_in_the_list_of_workers(environ: dict[str, str]) -> None:
    assert worker_of_rank(environ, WORKERS) == "middle.2"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ["no rank", "OMPI_COMM_WORLD_RANK", "start it with mpirun", "--module"]),
        (SLURM, ["no rank"]),  # the batch script itself
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            ["process 1 (OMPI_COMM_WORLD_RANK) of 2", "4 workers: bottom, middle.1", "mpirun -n 4"],
        ),
        ({"PMI_RANK": "4", "PMI_SIZE": "6"}, ["process 4 (PMI_RANK) of 6", "mpirun -n 4"]),
        ({"PMIX_RANK": "4"}, ["process 4 (PMIX_RANK), but", "mpirun -n 4"]),
        ({"PMI_RANK": "-1", "PMI_SIZE": "4"}, ["PMI_RANK='-1' is not a number"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "many"}, ["PMI_SIZE='many' is not a number"]),
    ],
)
def test_processes_that_do_not_fit(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        worker_of_rank(environ, WORKERS)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of the modules a, b and c."""
    run = RunDir(tmp_path / "run")
    run.create()
    specs = specs_of()
    for spec in specs:
        write_atomic(run.spec(spec.module), spec.to_json())
    RunRecord(
        run="run", chain="c", modules=("a", "b", "c"), backend="process", epochs=1, created=1.5,
        chain_file=Path("c.yaml"), host="here",
    ).write(run.record)  # fmt: skip
    return run


RANK_1 = {"PMI_RANK": "1", "PMI_SIZE": "3"}


def test_each_start_is_another_attempt(run: RunDir) -> None:
    start = by_rank(WorkerStart(str(run.root), by_rank=True), RANK_1)
    assert (start.module, start.attempt) == ("b", 1)
    assert start.ipc
    Report(module="b", attempt=4).write(run.worker("b"))
    again = by_rank(WorkerStart(str(run.root), by_rank=True), RANK_1)
    assert (again.attempt, again.ipc) == (5, start.ipc)
    Path(start.ipc).rmdir()


def test_a_pod_is_replaced_alone_if_its_job_is_the_same(run: RunDir) -> None:
    start, index = WorkerStart(str(run.root), "b", by_rank=True, start=7), {JOB_INDEX: "0"}

    def report(**more: object) -> WorkerStart:
        before = ChainStart(number=7, first=3, **more)  # type: ignore[arg-type]
        Report(module="b", attempt=4, chain_start=before).write(run.worker("b"))
        return by_rank(start, index)

    new = by_rank(start, index)
    assert (new.module, new.attempt, new.first, new.resume) == ("b", 1, 1, "auto")
    again = report(cut=20)
    assert (again.attempt, again.first, again.resume) == (5, 3, "20")
    assert chain_start(again) == ChainStart(number=7, first=3, cut=20)
    not_begun = report()
    assert (not_begun.first, not_begun.resume) == (5, "auto")
    report(cut=20)
    other = by_rank(replace(start, start=8), index)
    assert (other.first, other.resume) == (5, "auto")
    assert by_rank(replace(start, module=""), RANK_1).first is None, "mpirun restarts all"
    with pytest.raises(UsageError, match="no module 'x'"):
        by_rank(replace(start, module="x"), index)
    Path(new.ipc).rmdir()


def test_ranks_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no run.*\n.*dnictl mpi"):
        by_rank(WorkerStart(str(tmp_path), by_rank=True), RANK_1)


def test_an_image_serves_any_module_of_its_chain(run: RunDir, tmp_path: Path) -> None:
    a, b, _ = specs_of()
    image = tmp_path / "module.json"
    image.write_text(a.to_json())
    start = WorkerStart(str(run.root), module="b")
    with pytest.raises(ImageError):
        load_spec(start, image)  # without --by-rank it serves its own module alone
    start = replace(start, by_rank=True)
    assert load_spec(start, image) == b
    image.write_text(a.model_copy(update={"seed": 9}).to_json())
    with pytest.raises(ImageError, match="of another spec of module 'a'"):
        load_spec(start, image)
    image.write_text(a.model_copy(update={"module": "x"}).to_json())
    with pytest.raises(ImageError, match="module 'x', which the run's chain lacks"):
        load_spec(start, image)
