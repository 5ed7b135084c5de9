"""SIF files: copies, listings, metadata."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dni_runtime.errors import ImageError, UnavailableError
from dni_runtime.image import check, sif
from dni_runtime.image.apptainer import Apptainer

LISTING = """\
------------------------------------------------------------------------------
ID   |GROUP   |LINK    |SIF POSITION (start-end)  |TYPE
------------------------------------------------------------------------------
1    |1       |NONE    |32176-33071               |Def.FILE
2    |1       |NONE    |33071-35881               |JSON.Generic
3    |1       |NONE    |36864-326348800           |FS (Squashfs/*System/amd64)
4    |1       |NONE    |326348800-326352896       |FS (Squashfs/Overlay/amd64)
5    |NONE    |1   (G) |326355800-326357664       |Signature (SHA-256)
"""


def test_listing_is_parsed() -> None:
    found = sif.parse_list(LISTING)
    assert [o.id for o in found] == [1, 2, 3, 4, 5]
    assert found[1].type == "JSON.Generic"
    assert found[3].start == 326348800
    assert found[3].type == "FS (Squashfs/Overlay/amd64)"


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_copy(tmp_path: Path, size: int) -> None:
    source = tmp_path / "a"
    source.write_bytes(os.urandom(size))
    sif.copy_image(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == source.read_bytes()


def test_copy_between_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.copy_file_range

    def refuse(*args: int) -> int:
        calls.append(args)
        if len(calls) == 1:
            return real(args[0], args[1], 10)
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    source = tmp_path / "a"
    source.write_bytes(os.urandom(1000))
    sif.copy_image(source, tmp_path / "b")
    assert len(calls) == 2
    assert (tmp_path / "b").read_bytes() == source.read_bytes()


def test_metadata_gets_the_modules_labels_and_help() -> None:
    document = {"data": {"attributes": {"labels": {"io.dni-runtime.torch": "2"}, "runscript": "r"}}}
    sif.edit_metadata(document, {"module": "head"}, "how to")
    attributes = document["data"]["attributes"]
    assert attributes["labels"] == {"io.dni-runtime.torch": "2", "io.dni-runtime.module": "head"}
    assert attributes["helpfile"] == "how to"
    assert attributes["runscript"] == "r"


Files = dict[str, str | Path]
"""Text, or where a link leads, by path."""


def partitions(folder: Path, *layers: Files, types: str = "Squashfs") -> tuple[Apptainer, Path]:
    """An image of real squashfs partitions, the lowest first, and a program that lists them."""
    if shutil.which("mksquashfs") is None or shutil.which("unsquashfs") is None:
        pytest.skip("squashfs-tools are not installed")
    image, rows = folder / "-image.sif", []
    with image.open("wb") as file:
        for index, files in enumerate(layers):
            root = folder / f"layer-{index}"
            for name, content in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, Path):
                    path.symlink_to(content)
                else:
                    path.write_text(content)
            packed = folder / f"{index}.sqfs"
            argv = ["mksquashfs", root, packed, "-noappend", "-quiet", "-no-progress", "-all-root"]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            start = file.tell()
            file.write(packed.read_bytes())
            kind = "*System" if index == 0 else "Overlay"
            where = f"{start}-{file.tell()}"
            rows.append(f"{index + 1} |1 |NONE |{where} |FS ({types}/{kind}/amd64)")
    program = folder / "apptainer"
    rows_text = "\n".join(rows)
    program.write_text(f"#!/bin/sh\n[ $1-$2 = sif-list ] || exit 3\ncat <<E\n{rows_text}\nE\n")
    program.chmod(0o755)
    return Apptainer(program, "apptainer", (1, 4, 5)), image


def test_the_spec_is_read_from_the_topmost_layer_that_has_one(tmp_path: Path) -> None:
    base = {
        "opt/dni/module.json": '{"in": "base"}',
        sif._LABELS: '{"io.dni-runtime.module": "a\\u001b[2J", "io.dni-runtime.\\u001bc": ""}',
    }
    tool, image = partitions(tmp_path, base, {"opt/dni/src/x.py": ""})
    labels = {"module": "a?[2J", "?c": ""}
    assert check.inspect_image(tool, image) == check.Inspection(labels, {"in": "base"})
    shutil.rmtree(tmp_path / "layer-1")
    tool, image = partitions(tmp_path, base, {"opt/dni/module.json": '{"in": "layer"}'})
    assert check.inspect_image(tool, image).module == {"in": "layer"}


def test_an_image_without_a_module(tmp_path: Path) -> None:
    tool, image = partitions(tmp_path, {"etc/hostname": "x"})
    with pytest.raises(ImageError, match=r"holds no module of a chain \(/opt/dni/module\.json\)"):
        check.inspect_image(tool, image)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"opt/dni/module.json": Path("/etc/hostname")}, "symbolic link"),
        ({"opt/dni/module.json": Path("../../../../../../../etc/hostname")}, "symbolic link"),
        ({"opt/dni": Path("/etc")}, "symbolic link"),
        ({"opt/dni/module.json/x": ""}, "is a directory"),
        ({"opt/dni/module.json": "x" * 2000}, "printed more than 1000 bytes"),
        ({"opt/dni/module.json": "[" * 900}, "not a module's spec"),
        ({"opt/dni/module.json": "[]"}, "not a module's spec: not an object"),
        ({"opt/dni/module.json": '{"\\ud800": NaN'}, "not a module's spec"),
    ],
    ids=["link", "relative-link", "folder-link", "folder", "large", "deep", "list", "cut"],
)
def test_hostile_specs(
    tmp_path: Path, files: Files, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links count inside the image only: this host has the files that these lead to."""
    monkeypatch.setattr(sif, "MOST_READ_BYTES", 1000)
    tool, image = partitions(tmp_path, files)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ImageError, match=words):
        check.inspect_image(tool, image)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_partition_that_hides_the_spec_is_refused(tmp_path: Path) -> None:
    tool, image = partitions(tmp_path, {"opt/dni/module.json": "{}"}, types="Ext3")
    with pytest.raises(ImageError, match=r"a partition that is not a squashfs \(FS \(Ext3"):
        check.inspect_image(tool, image)


def test_without_unsquashfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, image = partitions(tmp_path, {"opt/dni/module.json": "{}"})
    old = tmp_path / "bin" / "unsquashfs"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'SYNTAX: unsquashfs [options] filesystem'; exit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    with pytest.raises(UnavailableError, match=r"too old: .*\n.*4\.5"):
        check.inspect_image(tool, image)
    old.unlink()
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setattr("dni_runtime.image.apptainer.SYSTEM_FOLDERS", ())
    program = tmp_path / "apptainer"
    program.write_text(program.read_text().replace("cat <<", "/bin/cat <<"))
    with pytest.raises(UnavailableError, match=r"not installed\n.*squashfs-tools"):
        check.inspect_image(tool, image)
