"""What is checked before a release is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import ImageError
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.release.make import release_run
from dni_runtime.release.store import Store
from dni_runtime.run.record import Record
from dni_runtime.spec import WorkerSpec
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
