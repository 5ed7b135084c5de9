"""SIF files: copies, listings, metadata."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dni_runtime.image import sif

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
