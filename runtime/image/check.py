"""Checks of finished images: hash, signature, labels and content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dni_runtime.errors import BuildError, DataError, ImageError
from dni_runtime.image import apptainer, sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.layers import MODULE_JSON
from dni_runtime.image.lock import LOCK_NAME, LockedImage, read_lock
from dni_runtime.image.wheels import sha256_file


@dataclass(frozen=True, slots=True)
class Verification:
    sha256: str  # of the file, as in the lock
    signed: bool  # a signature was checked and is valid


@dataclass(frozen=True, slots=True)
class Inspection:
    labels: dict[str, str]  # ours, without prefix
    module: dict[str, Any]  # the worker's spec


def locked_images(folder: Path) -> list[Path]:
    """Return all module images that a folder's lock names."""
    lock = read_lock(folder)
    if lock is None:
        raise DataError(
            f"{folder / LOCK_NAME} does not exist", hint="build the images: dnictl build"
        )
    if not lock.modules:
        raise ImageError(
            f"{folder / LOCK_NAME} names no image: building them was not finished",
            hint="build the images: dnictl build",
        )
    return [folder / entry.image for entry in lock.modules.values()]


def lock_entry(image: Path) -> LockedImage:
    """Return an image's entry in the lock beside it."""
    if not image.is_file():
        raise DataError(f"{image} does not exist", hint="build it: dnictl build")
    lock = read_lock(image.parent)
    if lock is None:
        raise DataError(
            f"there is no {LOCK_NAME} beside {image}, to compare it with",
            hint=f"copy {LOCK_NAME} together with the images",
        )
    for entry in lock.modules.values():
        if entry.image == image.name:
            return entry
    raise ImageError(
        f"{image} is not in {image.parent / LOCK_NAME}",
        hint="it was not built together with the others: dnictl build",
    )


def verify_image(
    image: Path,
    *,
    key: Path | None = None,  # public, in PEM form; default: the local PGP keyring
    require_signature: bool = False,  # refuse unsigned images
) -> Verification:
    """Compare an image with its lock, and check its signature if it has, or must have, one."""
    entry = lock_entry(image)
    sha256 = verify_hash(image, entry)
    if entry.signed is None and not require_signature and key is None:
        return Verification(sha256, signed=False)
    if entry.signed is None:
        raise ImageError(f"{image} is not signed", hint="sign it: dnictl build --sign")
    if entry.signed == "pem" and key is None:
        raise ImageError(
            f"{image} was signed with a key in PEM form",
            hint="give the public key: dnictl verify --key public.pem",
        )
    verify_signature(apptainer.find_apptainer(), image, key=key)
    return Verification(sha256, signed=True)


def verify_hash(image: Path, entry: LockedImage) -> str:
    """Compare an image's SHA-256 with its lock, and return it."""
    sha256 = sha256_file(image)
    if sha256 != entry.sha256:
        raise ImageError(
            f"{image} is not the image that was built: its SHA-256 is {sha256[:16]}…, "
            f"in {LOCK_NAME} it is {entry.sha256[:16]}…",
            hint="copy it again from where it was built, or build it: dnictl build",
        )
    return sha256


def verify_sources(image: Path, entry: LockedImage, sources: Mapping[str, Path]) -> None:
    """Refuse an image with another content of one of a run's source files.

    A file that only one of them has is no difference: which of the user's modules are imported
    depends on the process.
    """
    hint = "rebuild the images of this code with 'dnictl build'"
    if entry.sources is None:
        raise ImageError(f"which code {image} was built from is not known", hint=hint)
    for name, sha256 in entry.sources.items():
        if name in sources and sha256_file(sources[name]) != sha256:
            raise ImageError(
                f"{image} was built from another {name!r} than {str(sources[name])!r}",
                hint=hint,
            )


def verify_signature(tool: Apptainer, image: Path, *, key: Path | None = None) -> None:
    """Check that an image's signature is valid, and of a known key."""
    try:
        apptainer.capture(apptainer.verify_argv(tool, image, key=key), what="verifying")
    except BuildError as error:
        why = next((line for line in reversed(error.tail) if line.startswith("FATAL")), "")
        why = why.removeprefix("FATAL:").strip() or error.message
        raise ImageError(
            f"the signature of {image} cannot be confirmed: {why}",
            hint="import the signer's public key: apptainer key import FILE; or pass it: "
            "--key public.pem",
        ) from error


def inspect_image(tool: Apptainer, image: Path) -> Inspection:
    """Read an image's labels and the spec of its module, without running the image."""
    if not image.is_file():
        raise DataError(f"{image} does not exist", hint="build it: dnictl build")
    labels = sif.read_labels(tool, image)
    try:
        module = json.loads(sif.read_module_json(tool, image))
        if not isinstance(module, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise ImageError(
            f"/{MODULE_JSON} in {image} is not a module's spec: {error}",
            hint="build the chain's images with: dnictl build",
        ) from error
    return Inspection(labels, module)
