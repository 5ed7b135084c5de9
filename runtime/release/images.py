"""A release's images: base, module layer and weights, put together in a SIF file each."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from dni_runtime.errors import ImageError
from dni_runtime.image import layers, sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.lock import LOCK_NAME, ImageLock, write_lock
from dni_runtime.image.oci import Manifest
from dni_runtime.image.wheels import host_machine, sha256_file
from dni_runtime.release.names import BASE, LAYER, TITLE, WEIGHTS
from dni_runtime.release.store import IMAGES, Store
from dni_runtime.worker.start import IMAGE_SERVING

_SERVING = IMAGE_SERVING.relative_to("/")


def assembled(tool: Apptainer, store: Store, text: str) -> Path:
    """Put a release's images together, unless they are there; return their folder."""
    target = store.folder(text) / IMAGES
    if target.is_dir():
        return target
    index = store.find(text)
    machine = store.report(index).machine
    if machine != host_machine():
        raise ImageError(f"the images of {text} are for {machine}; this host is {host_machine()}")
    modules, record = store.parts(index)
    (written,) = (one for one in record.layers if one.note(TITLE) == LOCK_NAME)
    lock = ImageLock.model_validate_json(store.layout.read(written))
    with store.scratch() as scratch:
        folder = scratch / IMAGES
        folder.mkdir()
        entries = {}
        for module, manifest in modules.items():
            image = _image(tool, store, manifest, folder / f"{module}.sif")
            entries[module] = lock.modules[module].model_copy(
                update={
                    "image": image.name,
                    "sha256": sha256_file(image),
                    "size_bytes": image.stat().st_size,
                    "signed": None,  # the release is, as a whole
                    "signer": None,
                }
            )
        write_lock(folder, lock.model_copy(update={"modules": entries}))
        with contextlib.suppress(OSError):  # another process was faster
            folder.rename(target)
    return target


def _image(tool: Apptainer, store: Store, manifest: Manifest, target: Path) -> Path:
    layout = store.layout
    blobs = {one.media_type: one for one in manifest.layers}
    config = json.loads(layout.read(manifest.config))
    with store.scratch() as scratch:
        image, weights = scratch / target.name, scratch / "weights.sqfs"
        files = {
            f"{_SERVING}/module.json": json.dumps(config["serving"], sort_keys=True).encode(),
            f"{_SERVING}/weights.safetensors": layout.checked(blobs[WEIGHTS]).read_bytes(),
        }
        layers.write_layer(files, scratch / "layer")
        layers.pack_layer(scratch / "layer", weights)
        sif.new_image(tool, image)
        sif.append_layer(tool, image, layout.checked(blobs[BASE]), system=True)
        for layer in (layout.checked(blobs[LAYER]), weights):
            sif.append_layer(tool, image, layer)
        if config["metadata"] is not None:
            document = scratch / sif.METADATA
            document.write_text(json.dumps(config["metadata"], indent="\t"), encoding="utf-8")
            sif.add_json(tool, image, document)
        image.chmod(0o644)
        image.replace(target)
    return target
