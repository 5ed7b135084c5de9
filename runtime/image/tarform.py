"""Module images as plain OCI images, which Docker, Podman and Kubernetes run.

The squashfs partitions of a SIF become layers (tar, gzip): the base, which all modules share by its
digest, and the module's own. Neither a daemon nor root is needed. Source: image-spec, ``layer.md``
and ``config.md``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dni_runtime.errors import BuildError, UnavailableError
from dni_runtime.image import apptainer, sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.definition import LABEL_PREFIX
from dni_runtime.image.oci import MANIFEST, Descriptor, Layout, Manifest
from dni_runtime.image.scratch import scratch_folder
from dni_runtime.image.wheels import host_machine

CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CHUNK_BYTES = 1 << 20
_PYTHON = "/opt/dni/venv/bin/python3"
_ENVIRONMENT = {
    "PATH": "/opt/dni/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": "/opt/dni/runtime:/opt/dni/src",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""As the definition of the base sets it (``definitions/base.def.j2``)."""
_UNSET = ("PYTHONHOME", "PYTHONSTARTUP")
_BASE_ENVIRONMENT = ".singularity.d/env/10-docker2singularity.sh"
_QUOTED = r'(?:[^"\\]|\\.)*'
_EXPORT = re.compile(
    rf'^export (\w+)="(?:\$\{{\1:-"({_QUOTED})"\}}|((?!\$\{{){_QUOTED}))"$',
    re.MULTILINE | re.DOTALL | re.ASCII,
)
"""How Apptainer writes the variables of an OCI image that a base is made from, there."""
_ESCAPES = {"n": "\n", "t": "\t"}
"""Apptainer 1.4 writes line ends and tabs as Go does, which shells do not read (its issue 3328)."""


def write_oci(
    tool: Apptainer,
    images: dict[str, Path],  # by the name in the layout
    layout: Layout,
    environment: dict[str, str],  # of the chain's ``image.environment``
) -> dict[str, Descriptor]:
    """Write SIF images into a layout; return the manifest of each.

    The same images give the same digests: squashfs files hold all times and owners.
    """
    layout.create()
    program = shutil.which("sqfs2tar", path=apptainer.host_environment(os.environ)["PATH"])
    if program is None:
        raise UnavailableError(
            "sqfs2tar, which makes layers of images, is not installed",
            hint="install the package squashfs-tools-ng",
        )
    layers: dict[str, tuple[Descriptor, str]] = {}  # by the partition's digest
    made = {}
    for name, image in images.items():
        parts = [
            _layer(program, image, part, layout, layers) for part in sif.partitions(tool, image)
        ]
        labels = sif.read_labels(tool, image)
        variables = _environment(sif.read_file(tool, image, _BASE_ENVIRONMENT) or b"") | environment
        config = {
            "architecture": _ARCHITECTURES.get(host_machine(), host_machine()),
            "os": "linux",
            "config": {
                "Entrypoint": [_PYTHON, "-m", "dni_runtime.worker"],
                "Env": [f"{key}={value}" for key, value in variables.items()],
                "User": "1000:1000",
                "Labels": {LABEL_PREFIX + key: value for key, value in labels.items()},
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in parts]},
        }
        manifest = Manifest(
            config=layout.add(_json(config), CONFIG), layers=tuple(layer for layer, _ in parts)
        )
        made[name] = layout.add(manifest.encode(), MANIFEST)
    layout.name(made)
    return made


def _environment(script: bytes) -> dict[str, str]:
    """Return the variables of a base and our own; nothing of an image is run for this."""
    found = {
        name: re.sub(r'\\([\\"`$nt])', lambda at: _ESCAPES.get(at[1], at[1]), value or path)
        for name, value, path in _EXPORT.findall(script.decode(errors="replace"))
        if name not in _UNSET
    }
    first, *others = _ENVIRONMENT["PATH"].split(":")
    folders = (first, *filter(None, found.get("PATH", "").split(":")), *others)
    return found | _ENVIRONMENT | {"PATH": ":".join(dict.fromkeys(folders))}


def _layer(
    program: str,
    image: Path,
    part: sif.SifObject,
    layout: Layout,
    layers: dict[str, tuple[Descriptor, str]],
) -> tuple[Descriptor, str]:
    """Return the layer of a partition, and the digest of its tar file."""
    with scratch_folder(layout.root, ".layer-") as scratch:
        squashfs = scratch / "layer.sqfs"
        sha256 = hashlib.sha256()
        with squashfs.open("wb") as file:
            for chunk in sif.content(image, part):
                sha256.update(chunk)
                file.write(chunk)
        key = sha256.hexdigest()
        if key not in layers:
            packed = scratch / "layer.tar.gz"
            tar, sha256 = hashlib.sha256(), hashlib.sha256()
            with packed.open("wb") as file:
                for chunk in _gzipped(_tar(program, squashfs), tar):
                    sha256.update(chunk)
                    file.write(chunk)
            layer = Descriptor(
                media_type=LAYER,
                digest=f"sha256:{sha256.hexdigest()}",
                size=packed.stat().st_size,
            )
            layout.take(packed, layer)
            layers[key] = layer, f"sha256:{tar.hexdigest()}"
    return layers[key]


def _tar(program: str, squashfs: Path) -> Iterator[bytes]:
    argv = [program, "--no-xattr", str(squashfs)]
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            while chunk := process.stdout.read(_CHUNK_BYTES):
                yield chunk
        errors.seek(0)
        said = errors.read().decode(errors="replace").splitlines()
    if process.returncode:
        raise BuildError("an image cannot be unpacked", tail=said[-20:])


def _gzipped(chunks: Iterator[bytes], tar: Any) -> Iterator[bytes]:
    """Yield chunks as one gzip member without a time or a name; ``tar`` hashes them."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for chunk in chunks:
        tar.update(chunk)
        yield packer.compress(chunk)
    yield packer.flush()


def _json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
