"""Signatures of releases: Apptainer signs a small SIF file that names the release's index.

So the keys are those of images: the user's PGP keyring, or a pair in PEM form.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from dni_runtime.errors import ImageError
from dni_runtime.image import apptainer, sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.build import sign
from dni_runtime.image.check import verify_signature
from dni_runtime.image.oci import MANIFEST, Descriptor, Layout, Manifest

_TYPE = "application/vnd.dni.signature.v1.sif"
_EMPTY = "application/vnd.oci.empty.v1+json"


def signature_name(index: Descriptor) -> str:
    """Return the name of an index's signature, in a layout and as a tag in a registry."""
    return f"{index.digest.replace(':', '-')}.sig"


def sign_release(tool: Apptainer, layout: Layout, index: Descriptor, key: Path | None) -> None:
    """Sign an index with a private PEM key, else with the user's PGP key."""
    with tempfile.TemporaryDirectory() as scratch:
        image, document = Path(scratch, "signature.sif"), Path(scratch, "release.json")
        document.write_bytes(_signed(index))
        sif.new_image(tool, image)
        sif.add_json(tool, image, document)
        sign(tool, image, key=key)
        layer = layout.add(image.read_bytes(), _TYPE)
    manifest = Manifest(artifact_type=_TYPE, config=layout.add(b"{}", _EMPTY), layers=(layer,))
    layout.name({signature_name(index): layout.add(manifest.encode(), MANIFEST)})


def verify_release(
    tool: Apptainer,
    layout: Layout,
    index: Descriptor,
    signature: Descriptor | None,  # of the index, in the layout
    key: Path | None,
) -> None:
    """Check that somebody whose key the user has, has signed an index; raises ``ImageError``."""
    if signature is None:
        raise ImageError(
            f"the release {index.digest} is not signed",
            hint="have it signed: dnictl release --key; or name the digest that you trust",
        )
    manifest = Manifest.parse(layout.read(signature), "the signature")
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch, "signature.sif")
        image.write_bytes(b"".join(layout.read(layer) for layer in manifest.layers))
        signed = [one for one in sif.objects(tool, image) if not one.type.startswith("Signature")]
        said = b""
        if len(signed) == 1:
            argv = apptainer.sif_argv(tool, "dump", str(signed[0].id), str(image))
            said = apptainer.capture_bytes(argv, what="reading the signature")
        if said != _signed(index):
            raise ImageError(f"the signature of {index.digest} is of something else")
        verify_signature(tool, image, key=key)


def _signed(index: Descriptor) -> bytes:
    return json.dumps({"release": index.digest}).encode()
