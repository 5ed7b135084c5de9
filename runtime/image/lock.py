"""``dni.lock``: a record of a build, beside the images, to verify them before use."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dni_runtime.errors import ImageError
from dni_runtime.files import write_atomic

LOCK_NAME = "dni.lock"


class _LockModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Wheel(_LockModel):
    """A wheel, in the base image or to install there."""

    name: str
    version: str
    file: str
    sha256: str


class LockedBase(_LockModel):
    content: str  # hash of its inputs (definition, wheels); its name in the cache
    sha256: str  # of the image file
    definition_sha256: str
    torch: str  # version, or "base" for the base's own
    wheels: tuple[Wheel, ...]
    mirror: str | None = None  # Debian's, for debootstrap


class LockedImage(_LockModel):
    image: str  # file name, in the lock's folder
    sha256: str  # of the file
    size_bytes: int
    mtime_ns: int | None = None  # of the file, where it was built
    content: str  # hash of its inputs (base, layer, build method)
    module_hash: str  # of the module's spec
    # SHA-256 of the user's files in it, by path; None in locks of before there were these.
    sources: dict[str, str] | None = None
    method: Literal["layer", "full"]  # on a copy of the base, or built from its own definition
    definition_sha256: str | None = None  # for "full"
    signed: Literal["pgp", "pem"] | None = None
    signer: str | None = None  # for "pem": SHA-256 of the private key's file


class ImageLock(_LockModel):
    """All images of a chain."""

    format: Literal[1] = 1
    chain: str
    builder: str
    runtime_version: str
    base: LockedBase
    modules: dict[str, LockedImage]


def read_lock(folder: Path) -> ImageLock | None:
    path = folder / LOCK_NAME
    try:
        return ImageLock.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise ImageError(
            f"{path} cannot be read: {error}",
            hint=f"remove it and build the images again: rm {path} && dnictl build",
        ) from error


def write_lock(folder: Path, lock: ImageLock) -> Path:
    """Write the lock atomically: readers see the old one or the new one."""
    path = folder / LOCK_NAME
    write_atomic(path, lock.model_dump_json(indent=1, exclude_none=True) + "\n")
    path.chmod(0o644)
    return path
