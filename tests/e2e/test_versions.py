"""Ten versions of a chain of four modules in a registry: the base once, and what is each one's own.

The images are small ones of the test's own, as nothing runs in them: of Apptainer only ``sif`` is
used, which root may use, too.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.image import sif
from dni_runtime.image.apptainer import Apptainer, find_apptainer
from dni_runtime.image.layers import pack_layer, write_layer
from dni_runtime.image.lock import ImageLock, LockedBase, LockedImage, write_lock
from dni_runtime.image.oci import Descriptor
from dni_runtime.image.wheels import sha256_file
from dni_runtime.release import move
from dni_runtime.release.make import release_run
from dni_runtime.release.names import BASE, LAYER, MODEL, MODEL_CONFIG, WEIGHTS
from dni_runtime.release.registry import Repository
from dni_runtime.release.store import Store
from dni_runtime.run.record import Record
from tests.e2e.conftest import Site, missing, need, run
from tests.e2e.test_release import Registry

pytestmark = [pytest.mark.apptainer, pytest.mark.e2e, pytest.mark.timeout(300)]

MODULES = ["stem", "low", "high", "top"]
LINEAR = "{Linear: {in_features: 64, out_features: %d}}"
CHAIN = f"""\
name: digits
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: 10
checkpoint: {{keep: 10}}
modules:
  - {{name: stem, layers: [{LINEAR % 64}, ReLU]}}
  - {{name: low, layers: [{LINEAR % 64}, ReLU]}}
  - {{name: high, layers: [{LINEAR % 64}, ReLU]}}
  - {{name: top, layers: [{LINEAR % 10}]}}
"""
BASE_BYTES = 8 << 20
DOCUMENTS_BYTES = 120_000
"""The most that a version has besides layers and weights: chain, specs, figures, manifests."""


def write_images(tool: Apptainer, folder: Path, record: Record) -> None:
    """Write an image for each module, on one base, and their lock."""
    folder.mkdir()
    base, layer = folder / "base.sqfs", folder / "layer.sqfs"
    write_layer({"usr/lib/torch": random.Random(0).randbytes(BASE_BYTES)}, folder / "base")
    pack_layer(folder / "base", base)
    modules = {}
    for worker in record.specs()[1]:
        image = folder / f"{worker.module}.sif"
        content = random.Random(worker.module).randbytes(20_000)
        write_layer({"opt/dni/module": content}, folder / worker.module)
        pack_layer(folder / worker.module, layer)
        sif.new_image(tool, image)
        sif.append_layer(tool, image, base, system=True)
        sif.append_layer(tool, image, layer)
        layer.unlink()
        modules[worker.module] = LockedImage(
            image=image.name, sha256=sha256_file(image), size_bytes=image.stat().st_size,
            content="1" * 64, module_hash=worker.hash, sources={}, method="layer",
        )  # fmt: skip
    locked = LockedBase(
        content="2" * 64, sha256="3" * 64, definition_sha256="4" * 64, torch="2.13.0", wheels=()
    )
    lock = ImageLock(
        chain="digits", builder="none", runtime_version="0", base=locked, modules=modules
    )
    write_lock(folder, lock)


def silent(blob: Descriptor, count: int) -> None:
    pass


def test_a_registry_grows_by_the_base_once(site: Site) -> None:
    try:
        tool = find_apptainer()
    except UnavailableError as error:
        missing(str(error))
    site.folder.joinpath("chain.yaml").write_text(CHAIN)
    site.run("up", "--backend", "process", "--name", "trained")
    record = Record.read(site.latest.root)
    cuts = site.cuts(MODULES)
    images, store = site.folder / "images", Store(site.folder / "store")
    write_images(tool, images, record)
    layout, grown, files = store.layout, list[int](), list[int]()
    with Registry(site.folder / "registry").serving() as hub:
        for number, cut in enumerate(sorted(cuts)):
            name, before = f"digits:1.{number}", hub.bytes()
            index = release_run(store, record, cut, name, tool=tool, images=images)
            store.add(index)
            move.push(store, name, hub.address(None), Repository(hub.address()), silent)
            grown.append(hub.bytes() - before)
        for number in (0, 1):
            before = hub.bytes()
            name, target = f"digits:1.{number}", hub.address(None)
            move.push_files(tool, store, name, target, True, silent)
            files.append(hub.bytes() - before)
        # Whoever knows models, and not us, takes the weights alone.
        (model,) = (
            one for one in layout.manifests(index)[0].manifests if one.artifact_type == MODEL
        )
        argv = [need("skopeo"), "--insecure-policy", "copy", "--src-tls-verify=false"]
        source = f"docker://{hub.host}/models/digits@{model.digest}"
        assert run([*argv, source, f"dir:{site.folder / 'model'}"]).returncode == 0
    assert len(grown) == 10
    blobs = layout.blobs(index)
    (base,) = (blob.size for blob in blobs if blob.media_type == BASE)
    layers = sum(blob.size for blob in blobs if blob.media_type == LAYER)
    weights = sum(blob.size for blob in blobs if blob.media_type == WEIGHTS)
    own = layers + weights + DOCUMENTS_BYTES
    print(
        f"ten versions of four modules: {grown[0]} bytes, then {grown[1:]}: {sum(grown)} (the base "
        f"{base}, layers {layers}, weights {weights}); a file for each module: {files} a version"
    )
    assert BASE_BYTES < base < BASE_BYTES + 10_000
    assert base + layers + weights < grown[0] < base + own
    assert all(weights < growth < weights + DOCUMENTS_BYTES for growth in grown[1:])
    assert sum(grown) < base + 10 * own < 2 * base
    assert all(4 * base < growth < 4 * base + own + DOCUMENTS_BYTES for growth in files)

    fetched = json.loads((site.folder / "model" / "manifest.json").read_text())
    assert fetched["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert fetched["config"]["mediaType"] == MODEL_CONFIG
    paths = [layer["annotations"]["org.cncf.model.filepath"] for layer in fetched["layers"]]
    assert paths == [f"{module}.safetensors" for module in MODULES]
    digests = [layer["digest"] for layer in fetched["layers"]]
    assert sorted(digests) == sorted(blob.digest for blob in blobs if blob.media_type == WEIGHTS)
    config = site.folder / "model" / fetched["config"]["digest"].removeprefix("sha256:")
    document = json.loads(config.read_text())
    # Its schema takes no other keys (modelpack/model-spec, schema/config-schema.json).
    assert document.keys() == {"descriptor", "config", "modelfs"}
    assert document["descriptor"].keys() == {"name", "version", "createdAt"}
    assert document["config"] == {"format": "safetensors"}
    assert document["modelfs"] == {"type": "layers", "diffIds": digests}
