"""SIF files: copying a base image, appending a layer, giving it the module's labels and help."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dni_runtime.errors import BuildError, ImageError
from dni_runtime.image import apptainer
from dni_runtime.image.apptainer import Apptainer, sif_argv
from dni_runtime.image.definition import LABEL_PREFIX

_ARCHITECTURES = {
    "i686": 1, "x86_64": 2, "armv7l": 3, "aarch64": 4, "ppc64": 5, "ppc64le": 6, "s390x": 11,
    "riscv64": 12,
}  # fmt: skip
_PARTITION, _GENERIC_JSON = "4", "6"  # --datatype of apptainer-sif-add(1)
_SQUASHFS, _OVERLAY = "1", "4"  # --partfs, --parttype
_GROUP = "1"  # the group that `sign` and `verify` cover by default
_METADATA = "inspect-metadata.json"


@dataclass(frozen=True, slots=True)
class SifObject:
    """One object in a SIF file."""

    id: int
    type: str


def copy_image(source: Path, target: Path) -> None:
    """Copy a large file inside the kernel, sharing its blocks where the file system can."""
    with source.open("rb") as reader, target.open("wb") as writer:
        left = os.fstat(reader.fileno()).st_size
        try:
            while left > 0:
                copied = os.copy_file_range(reader.fileno(), writer.fileno(), left)
                if copied == 0:
                    break
                left -= copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            reader.seek(0)
            writer.seek(0)
            writer.truncate()
            shutil.copyfileobj(reader, writer, 1 << 20)


def parse_list(text: str) -> list[SifObject]:
    """The objects in the output of ``apptainer sif list``."""
    rows = (re.match(r"(\d+)\s*\|.*\|\s*(\S.*?)\s*$", line) for line in text.splitlines())
    return [SifObject(int(row[1]), row[2]) for row in rows if row is not None]


def objects(tool: Apptainer, image: Path) -> list[SifObject]:
    """The objects in a SIF file.

    Raises:
        ImageError: It is not a SIF file.
    """
    try:
        return parse_list(apptainer.capture(sif_argv(tool, "list", str(image)), what="reading"))
    except BuildError as error:
        last = error.tail[-1] if error.tail else str(error)
        raise ImageError(f"{image} is not a SIF image: {last}") from error


def append_layer(tool: Apptainer, image: Path, layer: Path, *, machine: str) -> None:
    """Append a squashfs file as an overlay partition, which Apptainer mounts over the base.

    Raises:
        BuildError: The container program refuses.
    """
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        raise BuildError(f"no SIF architecture is known for {machine!r}", hint="use --full")
    argv = sif_argv(
        tool, "add", "--datatype", _PARTITION, "--partfs", _SQUASHFS, "--parttype", _OVERLAY,
        "--partarch", str(architecture), "--groupid", _GROUP, str(image), str(layer),
    )  # fmt: skip
    apptainer.capture(argv, what=f"appending the layer to {image.name}")


def edit_metadata(document: dict[str, Any], labels: Mapping[str, str], help_text: str) -> None:
    """Put a module's labels and help into the metadata that a build wrote."""
    attributes = document["data"]["attributes"]
    attributes.setdefault("labels", {}).update(
        {LABEL_PREFIX + name: value for name, value in labels.items()}
    )
    attributes["helpfile"] = help_text


def relabel(
    tool: Apptainer, image: Path, labels: Mapping[str, str], help_text: str, *, scratch: Path
) -> bool:
    """Give a copied base image the module's labels and help, for ``inspect`` and ``run-help``.

    Files in the layer cannot do it: where a SIF holds the metadata object that Apptainer writes at
    each build, ``inspect`` and ``run-help`` read only that.

    Returns:
        False when the image has no such object (built by an old Singularity).
    """
    found = [o.id for o in objects(tool, image) if o.type.startswith("JSON.Generic")]
    if not found:
        return False
    id_ = str(found[0])
    text = apptainer.capture(sif_argv(tool, "dump", id_, str(image)), what="reading the labels")
    try:
        document = json.loads(text)
        edit_metadata(document, labels, help_text)
    except (ValueError, KeyError, TypeError):
        return False
    path = scratch / _METADATA
    path.write_text(json.dumps(document, indent="\t"), encoding="utf-8")
    apptainer.capture(sif_argv(tool, "del", id_, str(image)), what="replacing the labels")
    argv = ["--datatype", _GENERIC_JSON, "--groupid", _GROUP, "--filename", _METADATA]
    apptainer.capture(
        sif_argv(tool, "add", *argv, str(image), str(path)), what="writing the labels"
    )
    with contextlib.suppress(OSError):
        path.unlink()
    return True


def read_labels(tool: Apptainer, image: Path) -> dict[str, str]:
    """An image's own labels (those with our prefix), without the prefix.

    Raises:
        ImageError: It is not an image that can be inspected.
    """
    try:
        text = apptainer.capture(apptainer.inspect_argv(tool, image), what="inspecting")
        labels = json.loads(text)["data"]["attributes"].get("labels") or {}
    except (BuildError, ValueError, KeyError, TypeError) as error:
        raise ImageError(
            f"{image} cannot be inspected: {error}", hint="is it an Apptainer image?"
        ) from error
    return {
        name.removeprefix(LABEL_PREFIX): value
        for name, value in labels.items()
        if name.startswith(LABEL_PREFIX)
    }


def read_module_json(tool: Apptainer, image: Path) -> str:
    """The worker's spec in a module image, read inside the container (it may be in either layer).

    Raises:
        ImageError: The image holds none.
    """
    try:
        return apptainer.capture(
            apptainer.exec_argv(tool, image, ["cat", "/opt/dni/module.json"]),
            what=f"reading the spec in {image.name}",
        )
    except BuildError as error:
        raise ImageError(
            f"{image} holds no module of a chain (/opt/dni/module.json)",
            hint="build the chain's images with: dnictl build",
        ) from error
