"""Images as plain OCI images: made of small SIFs, and read by another program."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from dni_runtime.image import sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.layers import pack_layer
from dni_runtime.image.oci import Layout, Manifest
from dni_runtime.image.tarform import write_oci
from tests.e2e.conftest import need

pytestmark = [pytest.mark.e2e, pytest.mark.apptainer]


def image_of(tool: Apptainer, path: Path, *layers: str) -> Path:
    """A SIF with a partition for each word, which is the content of a file."""
    sif.new_image(tool, path)
    for word in layers:
        root = path.with_suffix(f".{word}")
        (root / "opt/dni").mkdir(parents=True)
        (root / "opt/dni" / word).write_text(word)
        pack_layer(root, path.with_suffix(".sqfs"))
        sif.append_layer(tool, path, path.with_suffix(".sqfs"))
    return path


def test_modules_share_the_base(tool: Apptainer, tmp_path: Path) -> None:
    need("sqfs2tar")
    images = {
        name: image_of(tool, tmp_path / f"{name}.sif", "base", name) for name in ("bottom", "top")
    }
    layout = Layout(tmp_path / "layout")
    made = write_oci(tool, images, layout, {"A": "b c"})
    assert layout.names().keys() == {"bottom", "top"}
    manifests = {name: Manifest.parse(layout.read(one), name) for name, one in made.items()}
    bottom, top = manifests["bottom"].layers, manifests["top"].layers
    assert bottom[0] == top[0]
    assert bottom[1] != top[1]
    config = json.loads(layout.read(manifests["top"].config))
    assert "A=b c" in config["config"]["Env"]
    for layer, diff_id, word in zip(
        top, config["rootfs"]["diff_ids"], ("base", "top"), strict=True
    ):
        with tarfile.open(layout.path(layer.digest)) as archive:
            members = {one.name.lstrip("./"): one for one in archive}
        assert f"opt/dni/{word}" in members
        assert {(one.uid, one.gid, one.mtime) for one in members.values()} == {(0, 0, 0)}
        unpacked = gzip.decompress(layout.path(layer.digest).read_bytes())
        assert diff_id == f"sha256:{hashlib.sha256(unpacked).hexdigest()}"
    again = write_oci(tool, images, Layout(tmp_path / "again"), {"A": "b c"})
    assert again == made, "the same images, the same digests"


def test_variables_of_the_base_are_kept(tool: Apptainer, tmp_path: Path) -> None:
    """Those of an image that a base is made from: libraries of CUDA are found by them."""
    need("sqfs2tar")
    root, layer = tmp_path / "base", tmp_path / "base.sqfs"
    script = root / ".singularity.d/env/10-docker2singularity.sh"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/sh\nexport CUDA_HOME="${CUDA_HOME:-"/usr/local/cuda"}"\n')
    pack_layer(root, layer)
    image = tmp_path / "top.sif"
    sif.new_image(tool, image)
    sif.append_layer(tool, image, layer, system=True)
    layout = Layout(tmp_path / "layout")
    (made,) = write_oci(tool, {"top": image}, layout, {"A": "1"}).values()
    config = json.loads(layout.read(Manifest.parse(layout.read(made), "top").config))
    assert {"CUDA_HOME=/usr/local/cuda", "A=1"} <= set(config["config"]["Env"])


def test_skopeo_reads_and_copies_it(tool: Apptainer, tmp_path: Path) -> None:
    skopeo = need("skopeo")
    layout = tmp_path / "layout"
    image = image_of(tool, tmp_path / "top.sif", "base", "top")
    write_oci(tool, {"top": image}, Layout(layout), {})
    argv = [skopeo, "copy", "--insecure-policy", f"oci:{layout}:top", f"dir:{tmp_path / 'copy'}"]
    subprocess.run(argv, check=True)  # it compares all digests
    copied = json.loads((tmp_path / "copy" / "manifest.json").read_text())
    assert len(copied["layers"]) == 2
