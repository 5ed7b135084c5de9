"""Wheels by the real pip, from two small indexes in a folder: which index, and which hash."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from dni_runtime.errors import BuildError
from dni_runtime.image import wheels
from dni_runtime.image.progress import silent
from dni_runtime.image.wheels import Wheelhouse
from dni_runtime.spec import ImageSpec

pytestmark = pytest.mark.timeout(120)

RUNTIME = (
    "numpy", "pyzmq", "msgpack", "pydantic", "PyYAML", "safetensors", "pip",
    "uvicorn", "httptools", "uvloop", "orjson",
)  # fmt: skip
VERSION = "99.0"


class Index:
    """A package index in a folder (PEP 503), as ``--index-url file:…`` reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return self._folder.as_uri()

    def add(self, name: str, version: str, *requires: str, content: str = "") -> None:
        folder = self._folder / name.lower()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name.lower()}-{version}-py3-none-any.whl"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
        info = f"{name.lower()}-{version}.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{info}/METADATA", metadata)
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name.lower()}.py", content)
        links = [f'<a href="{one.name}">{one.name}</a>' for one in sorted(folder.glob("*.whl"))]
        (folder / "index.html").write_text("\n".join(links))


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The only index of pip's settings."""
    index = Index(tmp_path / "main")
    for name in (*RUNTIME, "filelock"):
        index.add(name, VERSION)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return index


def contents(house: Wheelhouse, name: str) -> str:
    (wheel,) = (one for one in house.wheels if one.name == name)
    with zipfile.ZipFile(house.folder / wheel.file) as archive:
        return f"{wheel.version} {archive.read(f'{name}.py').decode()}"


def test_no_index_stands_in_for_the_other(main: Index, tmp_path: Path) -> None:
    """Whoever puts a package of a taken name on one of them gains nothing."""
    theirs = Index(tmp_path / "theirs")
    theirs.add("torch", "2.0+cu1", "triton==3.0", "filelock", content="theirs")
    theirs.add("torchvision", "0.1+cu1", "torch==2.0", "numpy", content="theirs")
    theirs.add("triton", "3.0", content="theirs")
    main.add("torch", "2.0", content="squatted")
    main.add("torchvision", VERSION, content="squatted")
    main.add("triton", "3.0", content="squatted")
    for name in (*RUNTIME, "filelock"):
        theirs.add(name, "100.0", content="not theirs to give")
    image = ImageSpec(torch="torch==2.0", torch_index=theirs.url, requirements=("torchvision",))
    house = wheels.prepare(image, tmp_path / "cache", report=silent)
    assert contents(house, "torch") == "2.0+cu1 theirs"
    assert contents(house, "torchvision") == "0.1+cu1 theirs"
    assert contents(house, "triton") == "3.0 theirs"
    others = {
        one.version for one in house.wheels if one.name not in ("torch", "torchvision", "triton")
    }
    assert others == {VERSION}
    assert len(house.wheels) == len(RUNTIME) + 4


def test_a_lock_gives_the_same_wheels_on_another_machine(main: Index, tmp_path: Path) -> None:
    main.add("torch", "2.0", "filelock")
    image = ImageSpec(torch="torch>=2.0")
    first = wheels.prepare(image, tmp_path / "first", report=silent)
    main.add("torch", "3.0")
    main.add("filelock", "100.0")
    assert wheels.prepare(image, tmp_path / "new", report=silent).version("torch") == "3.0"

    second = wheels.prepare(image, tmp_path / "new", report=silent, locked=first.wheels)
    assert second.wheels == first.wheels
    second.check_hashes()
    assert wheels.cached(image, tmp_path / "new", locked=first.wheels) == second

    main.add("filelock", VERSION, content="altered")  # of the same name and version
    with pytest.raises(BuildError, match="DO NOT MATCH THE HASHES"):
        wheels.prepare(image, tmp_path / "third", report=silent, locked=first.wheels)
    assert wheels.cached(image, tmp_path / "third", locked=first.wheels) is None
