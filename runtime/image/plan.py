"""Build plans: which images differ from the last build that ``dni.lock`` records.

The inputs of an image (base, layer, labels, build method) are hashed; an image whose hash is
already in the lock is not rebuilt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dni_runtime.errors import DataError
from dni_runtime.image import layers
from dni_runtime.image.base import BasePlan, BuildOptions, plan_base
from dni_runtime.image.definition import render_module
from dni_runtime.image.layers import ModuleBuild
from dni_runtime.image.lock import LOCK_NAME, ImageLock, LockedImage, read_lock
from dni_runtime.image.wheels import sha256_file
from dni_runtime.spec import ImageSpec

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ModulePlan:
    module: ModuleBuild
    files: Mapping[str, bytes]  # its layer
    content: str | None  # hash of the image's inputs; None while the base's hash is not known
    definition: str | None  # its own, for "full"
    reason: str | None  # why it is built; None: the existing image is up to date
    sign: bool  # it is built and signed, or only signed
    locked: LockedImage | None


@dataclass(frozen=True, slots=True)
class BuildPlan:
    base: BasePlan
    modules: tuple[ModulePlan, ...]


def plan_build(
    modules: Sequence[ModuleBuild], image: ImageSpec, options: BuildOptions
) -> BuildPlan:
    """Plan a build without downloading, building or writing anything."""
    old = read_lock(options.out)
    base = plan_base(image, options, lock=lock_to_keep(old, options))
    return BuildPlan(base, plan_modules(modules, base, old, options))


def lock_to_keep(old: ImageLock | None, options: BuildOptions) -> ImageLock | None:
    """Return the lock that a build must reproduce, or None if it makes a new one."""
    if not options.locked:
        return None
    if old is None:
        raise DataError(
            f"--locked: {options.out / LOCK_NAME} does not exist",
            hint=f"copy the {LOCK_NAME} of the build to reproduce there, or omit --locked",
        )
    return old


def plan_modules(
    modules: Sequence[ModuleBuild], base: BasePlan, old: ImageLock | None, options: BuildOptions
) -> tuple[ModulePlan, ...]:
    """Compare each module with its image's entry in ``old``, the lock of the last build."""
    runtime = layers.runtime_files()
    plans = []
    for module in modules:
        files = layers.layer_files(module, runtime)
        definition = render_module(module.labels, module.help) if options.full else None
        content = None
        if base.content is not None:
            document = [
                _FORMAT,
                base.content,
                options.method,
                layers.layer_digest(files, module.hash),
                module.labels,
                definition,
            ]
            content = hashlib.sha256(json.dumps(document).encode()).hexdigest()
        locked = None if old is None else old.modules.get(module.name)
        reason = "--force" if options.force else _reason(content, locked, options)
        sign = options.sign and (reason is not None or locked is None or locked.signed is None)
        plans.append(ModulePlan(module, files, content, definition, reason, sign, locked))
    return tuple(plans)


def _reason(content: str | None, locked: LockedImage | None, options: BuildOptions) -> str | None:
    """Return why an image must be built, or None if it is up to date."""
    if locked is None:
        return "not built yet"
    if content != locked.content or locked.sources is None:
        return "changed"
    if options.sign and locked.signed not in (None, options.signature):
        return "signed otherwise"
    if options.sign and locked.signed is not None and locked.signer != options.signer:
        return "signed by another key"
    path = options.out / locked.image
    try:
        state = path.stat()
    except FileNotFoundError:
        return "missing"
    # One of another time was copied or altered, or the lock comes from elsewhere: it is read.
    if state.st_size != locked.size_bytes or (
        state.st_mtime_ns != locked.mtime_ns and sha256_file(path) != locked.sha256
    ):
        return "altered since it was built"
    return None
