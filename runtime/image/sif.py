"""SIF files: copying a base image, appending a layer, reading and writing its metadata.

Nothing here runs an image, because images may be untrusted. ``apptainer inspect`` is not used: it
starts the image's shell if an image has no metadata object.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dni_runtime.errors import BuildError, ImageError, UnavailableError
from dni_runtime.image import apptainer
from dni_runtime.image.apptainer import Apptainer, sif_argv
from dni_runtime.image.definition import LABEL_PREFIX
from dni_runtime.image.layers import MODULE_JSON
from dni_runtime.image.wheels import host_machine

_ARCHITECTURES = {
    "i686": 1, "x86_64": 2, "armv7l": 3, "aarch64": 4, "ppc64": 5, "ppc64le": 6, "s390x": 11,
    "riscv64": 12,
}  # fmt: skip
_PARTITION, _GENERIC_JSON = "4", "6"  # --datatype of apptainer-sif-add(1)
_SQUASHFS, _SYSTEM, _OVERLAY = "1", "2", "4"  # --partfs, --parttype
_GROUP = "1"  # the group that `sign` and `verify` cover by default
METADATA = "inspect-metadata.json"
_LABELS = ".singularity.d/labels.json"
_METADATA_TYPE, _PARTITION_TYPE, _SQUASHFS_TYPE = "JSON.Generic", "FS (", "FS (Squashfs/"

MOST_READ_BYTES = 16 << 20
"""Maximum size of a file to read; a module's spec has some kilobytes."""


@dataclass(frozen=True, slots=True)
class SifObject:
    id: int
    start: int  # bytes
    size: int
    type: str  # as "apptainer sif list" prints it


def copy_image(source: Path, target: Path) -> None:
    """Copy a large file inside the kernel, sharing its blocks if the file system can."""
    with source.open("rb") as reader, target.open("wb") as writer:
        remaining = os.fstat(reader.fileno()).st_size
        try:
            while remaining > 0:
                copied = os.copy_file_range(reader.fileno(), writer.fileno(), remaining)
                if copied == 0:
                    break
                remaining -= copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            reader.seek(0)
            writer.seek(0)
            writer.truncate()
            shutil.copyfileobj(reader, writer, 1 << 20)


def parse_list(text: str) -> list[SifObject]:
    """Return the objects in the output of ``apptainer sif list``."""
    pattern = re.compile(r"(\d+)\s*\|.*\|\s*(\d+)-(\d+)\s*\|\s*(\S.*?)\s*$")
    return [
        SifObject(int(row[1]), int(row[2]), int(row[3]) - int(row[2]), row[4])
        for line in text.splitlines()
        if (row := pattern.match(line)) is not None
    ]


def objects(tool: Apptainer, image: Path) -> list[SifObject]:
    try:
        argv = sif_argv(tool, "list", str(image.absolute()))
        return parse_list(apptainer.capture(argv, what="reading"))
    except BuildError as error:
        last = error.tail[-1] if error.tail else str(error)
        raise ImageError(f"{image} is not a SIF image: {last}") from error


def append_layer(tool: Apptainer, image: Path, layer: Path, *, system: bool = False) -> None:
    """Append a squashfs file as an overlay partition, which Apptainer mounts over the base.

    ``system``: it is the base of a new image.
    """
    architecture = _ARCHITECTURES.get(host_machine())
    if architecture is None:
        raise BuildError(f"no SIF architecture is known for {host_machine()!r}", hint="use --full")
    argv = sif_argv(
        tool, "add", "--datatype", _PARTITION, "--partfs", _SQUASHFS,
        "--parttype", _SYSTEM if system else _OVERLAY,
        "--partarch", str(architecture), "--groupid", _GROUP, str(image), str(layer),
    )  # fmt: skip
    apptainer.capture(argv, what=f"appending the layer to {image.name}")


def new_image(tool: Apptainer, image: Path) -> None:
    apptainer.capture(sif_argv(tool, "new", str(image)), what=f"making {image.name}")


def add_json(tool: Apptainer, image: Path, document: Path) -> None:
    """Add a JSON document, under its file name."""
    argv = ["--datatype", _GENERIC_JSON, "--groupid", _GROUP, "--filename", document.name]
    apptainer.capture(
        sif_argv(tool, "add", *argv, str(image), str(document)), what=f"writing to {image.name}"
    )


def partitions(tool: Apptainer, image: Path) -> list[SifObject]:
    """Return an image's squashfs partitions, the base first; raises ``ImageError`` for others."""
    parts = [o for o in objects(tool, image) if o.type.startswith(_PARTITION_TYPE)]
    for partition in parts:
        if not partition.type.startswith(_SQUASHFS_TYPE):
            raise ImageError(
                f"{image} cannot be read: it has a partition that is not a squashfs "
                f"({partition.type})",
                hint="use an image made by 'dnictl build'",
            )
    return parts


def content(image: Path, part: SifObject) -> Iterator[bytes]:
    """Yield the bytes of an image's object."""
    left = part.size
    with image.open("rb") as file:
        file.seek(part.start)
        while chunk := file.read(min(left, 1 << 20)):
            left -= len(chunk)
            yield chunk


def metadata(tool: Apptainer, image: Path) -> bytes | None:
    """Return the labels and the help that an image's build wrote; None if it wrote none."""
    id = _metadata_id(tool, image)
    if id is None:
        return None
    argv = sif_argv(tool, "dump", id, str(image.absolute()))
    return apptainer.capture_bytes(argv, what="reading the labels")


def _metadata_id(tool: Apptainer, image: Path) -> str | None:
    ids = [str(o.id) for o in objects(tool, image) if o.type.startswith(_METADATA_TYPE)]
    return ids[0] if ids else None


def edit_metadata(document: dict[str, Any], labels: Mapping[str, str], help_text: str) -> None:
    """Add a module's labels and help to the metadata that a build wrote."""
    attributes = document["data"]["attributes"]
    attributes.setdefault("labels", {}).update(
        {LABEL_PREFIX + name: value for name, value in labels.items()}
    )
    attributes["helpfile"] = help_text


def relabel(
    tool: Apptainer, image: Path, labels: Mapping[str, str], help_text: str, *, scratch: Path
) -> None:
    """Write the module's labels and help into a copied base image, for ``inspect``, ``run-help``.

    Files in the layer would not do: if a SIF holds the metadata object that Apptainer writes at
    each build, ``inspect`` and ``run-help`` read only that. An image without such an object (built
    by an old Singularity), or not in the expected form, stays as it is.
    """
    id, text = _metadata_id(tool, image), metadata(tool, image)
    if id is None or text is None:
        return
    try:
        document = json.loads(text)
        edit_metadata(document, labels, help_text)
    except (ValueError, KeyError, TypeError):
        return
    path = scratch / METADATA
    path.write_text(json.dumps(document, indent="\t"), encoding="utf-8")
    apptainer.capture(sif_argv(tool, "del", id, str(image)), what="replacing the labels")
    add_json(tool, image, path)
    with contextlib.suppress(OSError):
        path.unlink()


def read_labels(tool: Apptainer, image: Path) -> dict[str, str]:
    """Return an image's labels with our prefix, without the prefix."""
    labels: Any = {}
    try:
        if (text := metadata(tool, image)) is not None:
            labels = json.loads(text)["data"]["attributes"].get("labels") or {}
        elif (content := read_file(tool, image, _LABELS)) is not None:
            labels = json.loads(content)
        return {
            _printable(name.removeprefix(LABEL_PREFIX)): _printable(str(value))
            for name, value in labels.items()
            if name.startswith(LABEL_PREFIX)
        }
    except (BuildError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(
            f"the labels of {image} cannot be read: {error}",
            hint="build the chain's images with: dnictl build",
        ) from error


def _printable(text: str) -> str:
    """Replace unprintable characters of a label or its name, which could control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def read_module_json(tool: Apptainer, image: Path) -> bytes:
    """Return the worker's spec in a module image, whichever layer it is in."""
    content = read_file(tool, image, MODULE_JSON)
    if content is None:
        raise ImageError(
            f"{image} holds no module of a chain (/{MODULE_JSON})",
            hint="build the chain's images with: dnictl build",
        )
    return content


def read_file(tool: Apptainer, image: Path, path: str) -> bytes | None:
    """Read a small file from an image's squashfs partitions, topmost first; None if none has it.

    unsquashfs writes it to a pipe, so that paths and links of the image do not affect this host.
    """
    program = shutil.which("unsquashfs", path=apptainer.host_environment(os.environ)["PATH"])
    hint = "install the package squashfs-tools, version 4.5 or newer"
    if program is None:
        raise UnavailableError("unsquashfs, which reads images, is not installed", hint=hint)
    for partition in reversed(partitions(tool, image)):
        argv = [program, "-offset", str(partition.start), "-cat", str(image.absolute()), path]
        try:
            return apptainer.capture_bytes(
                argv, what=f"reading /{path}", most_bytes=MOST_READ_BYTES
            )
        except BuildError as error:
            last = error.tail[-1] if error.tail else error.message
            if "no matches for" in last:
                continue
            if any("SYNTAX:" in line for line in error.tail):
                raise UnavailableError(
                    f"{program} is too old: it cannot print files", hint=hint
                ) from None
            raise ImageError(
                f"/{path} of {image} cannot be read: {last}",
                hint="build the chain's images with: dnictl build",
            ) from error
    return None
