"""Wheels: the image's Python and platform, the lock, and what pip's own resolver overlooks."""

from __future__ import annotations

import itertools
import json
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dni_runtime.errors import BuildError, SpecError
from dni_runtime.image import wheels
from dni_runtime.image.progress import Step
from dni_runtime.image.wheels import Target
from dni_runtime.spec import ImageSpec

TARGET = Target("3.12", "aarch64")


def wheel(folder: Path, name: str, version: str = "1.0", requires: tuple[str, ...] = ()) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
    return path


def test_download_is_for_the_image_not_the_host() -> None:
    argv = wheels.download_argv(["torch==2.13.0"], Path("/w"), TARGET)
    pairs = list(itertools.pairwise(argv))
    assert argv[:4] == [sys.executable, "-m", "pip", "download"]
    assert ("--python-version", "3.12") in pairs
    assert ("--abi", "cp312") in pairs
    assert ("--platform", "manylinux_2_28_aarch64") in pairs
    assert ("--platform", "manylinux2014_aarch64") in pairs
    assert "--only-binary=:all:" in argv
    assert argv[-2:] == ["--", "torch==2.13.0"]


def test_runtime_requirements_are_the_distributions_own() -> None:
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    assert set(wheels.RUNTIME_REQUIREMENTS) <= set(project["dependencies"])
    assert set(wheels.FRONT_REQUIREMENTS) == set(project["optional-dependencies"]["serve"])


def test_requirements() -> None:
    image = ImageSpec(torch="torch==2.13.0", requirements=("einops>=0.8",))
    names = wheels.requirements_of(image)
    assert names[0] == "torch==2.13.0"
    assert names[-1] == "einops>=0.8"
    kept = wheels.requirements_of(ImageSpec(torch="base"))
    assert not any(name.startswith("torch") for name in kept)


@pytest.mark.parametrize(
    ("image", "location"),
    [
        (ImageSpec(torch="torch=2.13"), ("image", "torch")),
        (ImageSpec(torch="numpy"), ("image", "torch")),
        (ImageSpec(requirements=("einops", "--index-url x")), ("image", "requirements", 1)),
    ],
)
def test_malformed_requirements_are_refused(
    image: ImageSpec, location: tuple[str | int, ...]
) -> None:
    with pytest.raises(SpecError) as caught:
        wheels.requirements_of(image)
    assert caught.value.location == location


def test_cache_key_changes_with_what_is_wanted_only() -> None:
    key = wheels.cache_key(["a", "b"], None, TARGET)
    assert key == wheels.cache_key(["b", "a"], None, TARGET)
    others = [
        wheels.cache_key(["a"], None, TARGET),
        wheels.cache_key(["a", "b"], "index", TARGET),
        wheels.cache_key(["a", "b"], None, Target("3.11", "aarch64")),
        wheels.cache_key(["a", "b"], None, Target("3.12", "x86_64")),
    ]
    assert len({key, *others}) == 5


def test_markers_are_judged_for_the_images_python(tmp_path: Path) -> None:
    wheel(
        tmp_path,
        "app",
        requires=(
            'backport>=1; python_version < "3.13"',
            'legacy; python_version < "3.12"',
            'intel; platform_machine == "x86_64"',
            'docs; extra == "doc"',
            "Here_Already",
            "gone",
        ),
    )
    wheel(tmp_path, "here_already")
    assert wheels.missing_requirements(tmp_path, TARGET) == ["backport>=1", "gone"]


def _lock(folder: Path) -> None:
    found = [wheel.model_dump() for wheel in wheels.scan(folder)]
    (folder / "wheels.json").write_text(json.dumps(found))


def test_prepared_wheels_are_found_again_without_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "host_machine", lambda: "riscv64")
    image = ImageSpec(torch="torch==2.13.0")
    target = Target(image.base.python, "riscv64")
    key = wheels.cache_key(wheels.requirements_of(image), None, target)
    folder = tmp_path / "wheels" / key
    folder.mkdir(parents=True)
    wheel(folder, "torch", "2.13.0+cpu")
    _lock(folder)
    steps: list[Step] = []
    house = wheels.prepare(image, tmp_path, report=steps.append)
    assert [step.state for step in steps] == ["same"]
    assert house.version("torch") == "2.13.0+cpu"
    assert house.version("numpy") is None
    assert house.folder == folder


def test_broken_cache_is_not_used(tmp_path: Path) -> None:
    path = wheel(tmp_path, "torch")
    _lock(tmp_path)
    assert wheels.read_wheelhouse(tmp_path) is not None
    path.unlink()
    assert wheels.read_wheelhouse(tmp_path) is None
    (tmp_path / "wheels.json").write_text("{")
    assert wheels.read_wheelhouse(tmp_path) is None


def test_altered_wheel_is_not_installed(tmp_path: Path) -> None:
    path = wheel(tmp_path, "torch")
    _lock(tmp_path)
    house = wheels.read_wheelhouse(tmp_path)
    assert house is not None
    house.check_hashes()
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BuildError, match="not the file that was downloaded"):
        house.check_hashes()
