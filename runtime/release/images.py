"""A release's images: base, module layer and weights, put together in a SIF file each."""

from __future__ import annotations

import json
from pathlib import Path

from dni_runtime.errors import ImageError
from dni_runtime.image import layers, sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.layers import ROOT
from dni_runtime.image.lock import LOCK_NAME, ImageLock, read_lock, write_lock
from dni_runtime.image.oci import Descriptor, Manifest
from dni_runtime.image.wheels import host_machine, sha256_file
from dni_runtime.release.kinds import BASE, LAYER, MODULE, TITLE, WEIGHTS
from dni_runtime.release.store import IMAGES, Store

SERVING = f"{ROOT}/serving"
"""In the image: ``module.json``, as which it answers, and ``weights.safetensors``."""


def assembled(tool: Apptainer, store: Store, text: str) -> Path:
    """Put a release's images together, unless they are there; return their folder."""
    folder = store.folder(text) / IMAGES
    if read_lock(folder) is not None:  # it is written last
        return folder
    folder.mkdir(exist_ok=True)
    _, manifests = store.layout.manifests(store.find(text))
    lock: ImageLock | None = None
    made = {}
    for manifest in manifests:
        blobs = {one.media_type: one for one in manifest.layers}
        if manifest.artifact_type == MODULE:
            module = (manifest.annotations or {})[TITLE]
            made[module] = _image(tool, store, manifest, blobs, folder / f"{module}.sif")
        elif (written := _titled(manifest, LOCK_NAME)) is not None:
            lock = ImageLock.model_validate_json(store.layout.read(written))
    if lock is None or set(lock.modules) != set(made):
        raise ImageError(f"{text} lacks the lock of its images")
    entries = {
        module: lock.modules[module].model_copy(
            update={
                "image": image.name,
                "sha256": sha256_file(image),
                "size_bytes": image.stat().st_size,
                "signed": None,  # the release is, as a whole
            }
        )
        for module, image in made.items()
    }
    write_lock(folder, lock.model_copy(update={"modules": entries}))
    return folder


def _image(
    tool: Apptainer, store: Store, manifest: Manifest, blobs: dict[str, Descriptor], target: Path
) -> Path:
    layout, machine = store.layout, host_machine()
    config = json.loads(layout.read(manifest.config))
    with store.scratch() as scratch:
        image, weights = scratch / target.name, scratch / "weights.sqfs"
        files = {
            f"{SERVING}/module.json": json.dumps(config["serving"], sort_keys=True).encode(),
            f"{SERVING}/weights.safetensors": layout.path(blobs[WEIGHTS].digest).read_bytes(),
        }
        layers.write_layer(files, scratch / "layer")
        layers.pack_layer(scratch / "layer", weights)
        sif.new_image(tool, image)
        sif.append_layer(tool, image, layout.path(blobs[BASE].digest), machine=machine, system=True)
        for layer in (layout.path(blobs[LAYER].digest), weights):
            sif.append_layer(tool, image, layer, machine=machine)
        if config["metadata"] is not None:
            document = scratch / sif.METADATA
            document.write_text(json.dumps(config["metadata"], indent="\t"), encoding="utf-8")
            sif.add_json(tool, image, document)
        image.chmod(0o644)
        image.replace(target)
    return target


def _titled(manifest: Manifest, title: str) -> Descriptor | None:
    return next((one for one in manifest.layers if one.note(TITLE) == title), None)
