"""What is checked before a release is made, and what of a run is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import ImageError
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.measure.figures import MetricsReader
from dni_runtime.release.make import _stage, release_run
from dni_runtime.release.store import Store
from dni_runtime.run.documents.metrics import EVAL, EvaluationLine
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.checkpoint import write_part
from tests.unit.plan.test_host import write_images

TOOL = Apptainer(Path("/nowhere/apptainer"), "apptainer", (1, 4, 5))


def test_images_of_other_code_than_the_runs(
    tmp_path: Path, record: Record, workers: tuple[WorkerSpec, ...]
) -> None:
    """Weights are released with the code that they were trained by."""
    images, edited = tmp_path / "images", tmp_path / "layers.py"
    edited.write_text("print()\n")
    write_images(images, workers, sources={"pkg/layers.py": edited})
    store = Store(tmp_path / "releases")
    with pytest.raises(ImageError, match=r"bottom\.sif was built from another 'pkg/layers\.py'"):
        release_run(store, record, 0, "small:1", tool=TOOL, images=images)


def test_an_earlier_checkpoint_has_no_figures_of_later_training(
    tmp_path: Path, record: Record
) -> None:
    """They are of other weights; and how often a run was started is not in a release."""
    for name in record.modules:
        write_part(record.run, name, ({}, {"module": name, "cut": 24, "epoch": 1, "step": 23}))
    for step, attempt, accuracy in ((23, 1, 0.25), (46, 1, 0.5), (46, 2, 0.75)):
        EvaluationLine(
            kind="eval", step=step, attempt=attempt, time=9.5, loss=1.0,
            **{"accuracy": accuracy},  # type: ignore[arg-type]
        ).append(record.run.metrics("top"))  # fmt: skip
    _stage(record, 24, tmp_path / "staged", "small:1")
    staged = Record.read(tmp_path / "staged")
    lines = MetricsReader(staged).read(RunState.read(staged.run)).evaluations
    assert [(one.step, one.accuracy) for one in lines] == [(23, 0.25)]
    content = staged.run.metrics("top").read_bytes()
    assert EVAL in content
    assert b"time" not in content
    assert b"attempt" not in content
