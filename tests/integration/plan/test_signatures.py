"""Images whose signatures are required, and a container program that is asked for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import ImageError
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.plan.host import check_images
from dni_runtime.spec import WorkerSpec
from tests.unit.plan.test_host import write_images
from tests.unit.runs import chain, workers

__all__ = ["chain", "workers"]


@pytest.mark.parametrize(
    ("required", "words"),
    [(True, ["verify", "--local"]), ("public.pem", ["verify", "--key", "public.pem"])],
)
def test_signatures_that_are_required(
    tmp_path: Path, workers: tuple[WorkerSpec, ...], required: bool | str, words: list[str]
) -> None:
    """The container program is asked for each image, and has the last word."""
    folder = tmp_path / "images"
    write_images(folder, workers)
    program = tmp_path / "apptainer"
    asked = tmp_path / "asked"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\n'
        'case "$*" in *middle*) echo "FATAL: no" >&2; exit 255;; esac\n'
    )
    program.chmod(0o755)
    tool = Apptainer(program, "apptainer", (1, 4, 5))
    with pytest.raises(ImageError, match=r"signature of .*middle\.sif cannot be confirmed: no"):
        check_images(tool, workers, folder, {}, required)
    asked_for = sorted(line.split() for line in asked.read_text().splitlines())
    ways = [[*words, str(folder / f"{name}.sif")] for name in ("bottom", "middle", "top")]
    assert asked_for in (ways[:2], ways)  # all at once, as far as there are cores
    asked.unlink()
    check_images(tool, workers, folder, {})
    assert not asked.exists()
