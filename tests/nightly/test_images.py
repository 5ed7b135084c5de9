"""Images that CI does not build: whole ones, failing ones, the same by a lock without a cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dni_runtime.image import apptainer, sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.base import cache_folder
from dni_runtime.image.lock import read_lock
from tests.e2e.conftest import Dnictl, run, tool
from tests.e2e.test_images import chain, signed_by_pem, workplace, write

__all__ = ["tool", "workplace"]

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(900)]


def test_another_cache_builds_the_same_by_the_lock(
    workplace: Path, tool: Apptainer, tmp_path: Path
) -> None:
    """Its wheels are downloaded anew, by hash; only the base image is the first cache's."""
    first, second = workplace / "images", tmp_path / "images"
    write(workplace, chain(["head", "tail"]))
    Dnictl(workplace).run("build")
    cache = tmp_path / "cache" / "dnictl"
    (cache / "images").mkdir(parents=True)
    second.mkdir()
    shutil.copy(first / "dni.lock", second)
    lock = read_lock(first)
    assert lock is not None
    for ending in ("sif", "json"):
        name = f"base-{lock.base.content[:16]}.{ending}"
        (cache / "images" / name).symlink_to(cache_folder() / "images" / name)
    write(tmp_path, chain(["head", "tail"]))
    mine = Dnictl(tmp_path, {"XDG_CACHE_HOME": str(cache.parent)})
    assert mine.json("build", "--locked")["built"] == ["head", "tail"]
    built = read_lock(second)
    assert built is not None
    assert built.base == lock.base
    assert len(list(cache.glob("wheels/*/*.whl"))) == len(lock.base.wheels)
    for name in ("head", "tail"):
        assert built.modules[name].content == lock.modules[name].content
        layers = []
        for image in (first / f"{name}.sif", second / f"{name}.sif"):
            layer = next(o for o in sif.objects(tool, image) if "Overlay" in o.type)
            argv = apptainer.sif_argv(tool, "dump", str(layer.id), str(image))
            layers.append(apptainer.capture_bytes(argv, what="reading the layer"))
        assert layers[0] == layers[1] != b""
    shutil.rmtree(second)
    shutil.rmtree(cache)


def test_full_build(workplace: Path, tool: Apptainer) -> None:
    mine = signed_by_pem(workplace / "full", "--full")
    image = mine.folder / "images" / "only.sif"
    assert mine.json("inspect", image)["labels"]["chain"] == "three"
    assert "Module 'only'" in run([tool.path, "run-help", image]).stdout
    assert run([tool.path, "run", image, "--help"]).returncode == 0
    assert mine.json("build", "--full")["built"] == []
    # The same module as a layer is another image.
    assert mine.json("build")["built"] == ["only"]


def test_failed_build_shows_the_builders_words(workplace: Path) -> None:
    folder = workplace / "failing"
    folder.mkdir()
    write(folder, chain(["only"], packages=["no-such-package-at-all"]))
    done = Dnictl(folder).run("build", expect=70)
    assert "building the base image failed" in done.stderr
    assert "no-such-package-at-all" in done.stderr
    assert ".log" in done.stderr
    assert not list((folder / "images").glob("*.sif"))
