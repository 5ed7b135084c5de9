"""torchvision's ResNet-18 on a folder of images: the page's files and commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dni_runtime import Run
from tests.e2e.conftest import missing
from tests.e2e.pages import commands, section, shell, write_files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGE, HEADING = "goals.md", "A ResNet on a folder of images"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dark, striped and bright images, and the page's settings."""
    try:
        from torchvision.transforms.v2.functional import to_pil_image
    except (ImportError, RuntimeError) as error:
        missing(f"no torchvision for this torch: {error}")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 20), ("val", 8)):
        for kind in ("bright", "dark", "striped"):
            images = tmp_path / "images" / part / kind
            images.mkdir(parents=True)
            for number in range(count):
                image = torch.rand(3, 40, 40, generator=generator) * 0.5
                if kind == "striped":
                    image[:, ::4] += 0.5
                elif kind == "bright":
                    image += 0.5
                to_pil_image(image).save(images / f"{number}.png")
    write_files(section(PAGE, HEADING), tmp_path)
    return tmp_path


def test_a_resnet_on_a_folder_of_images(folder: Path) -> None:
    import onnx

    lines = commands(PAGE, HEADING)
    assert len(lines.splitlines()) == 4
    shell(lines, folder)
    (root,) = (folder / "runs").iterdir()
    status = Run.open(root).status()
    assert status.epoch == 4
    assert status.accuracy > 0.6
    assert (folder / "confusion.png").stat().st_size > 1000
    model = onnx.load(folder / "resnet.onnx")
    onnx.checker.check_model(model)
    assert [len(value.type.tensor_type.shape.dim) for value in model.graph.input] == [4]
