"""The base image: planned from settings and wheels, built once, cached by content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dni_runtime.errors import BuildError, DataError, ImageError, SpecError, UnavailableError
from dni_runtime.files import expanded, locked, xdg_folder
from dni_runtime.image import apptainer, wheels
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.definition import render_base
from dni_runtime.image.lock import LOCK_NAME, ImageLock, LockedBase, Wheel
from dni_runtime.image.progress import Reporter, Step
from dni_runtime.image.scratch import scratch_folder
from dni_runtime.image.wheels import Wheelhouse, sha256_file
from dni_runtime.spec import ImageSpec

_FORMAT = 1
_LOCAL_SOURCE = "source.sif"
_ROLLING = ("stable", "testing", "unstable", "sid")
"""Suites that a mirror has beside those with a name."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    out: Path  # of the module images and of dni.lock
    cache: Path  # of wheels and base images
    folder: Path  # the chain's, base of relative paths in the spec
    full: bool = False  # build each module from its own definition instead of appending a layer
    force: bool = False  # rebuild everything
    test: bool = True  # run the %test of images built from a definition
    sign: bool = False
    key: Path | None = None  # private, in PEM form; default: the user's PGP key
    locked: bool = False  # install exactly the packages that the lock in 'out' names

    @property
    def method(self) -> Literal["layer", "full"]:
        return "full" if self.full else "layer"

    @property
    def signature(self) -> Literal["pgp", "pem"] | None:
        return None if not self.sign else "pgp" if self.key is None else "pem"

    @property
    def signer(self) -> str | None:
        """What tells one PEM key from another; the signing program chooses the PGP key."""
        return sha256_file(self.key) if self.sign and self.key is not None else None


@dataclass(frozen=True, slots=True)
class BasePlan:
    """The plan of a base image, which may already be in the cache."""

    definition: str
    content: str | None  # hash of its inputs; None while its wheels are not resolved
    torch: str  # version, "base", or the requirement while it is not resolved
    source: Path | None  # the image to start from, for localimage
    image: Path | None  # in the cache; None while content is None
    mirror: str | None = None  # Debian's, for debootstrap

    @property
    def ready(self) -> bool:
        """Whether the cache holds it."""
        return self.image is not None and _recorded(self.image) is not None


def cache_folder() -> Path:
    """Return the folder of wheels and base images."""
    return xdg_folder("XDG_CACHE_HOME", ".cache")


def plan_base(
    image: ImageSpec,
    options: BuildOptions,
    *,
    house: Wheelhouse | None = None,  # by default looked up in the cache
    lock: ImageLock | None = None,  # whose base image to reproduce exactly
) -> BasePlan:
    """Plan the base image without building or downloading anything."""
    house = house or wheels.cached(image, options.cache, _wheels(lock))
    requirements = wheels.requirements_of(image)
    source = image.base.source
    local: Path | None = None
    if image.base.bootstrap == "localimage":
        local = (options.folder / expanded(source)).resolve()
        if not local.is_file():
            raise DataError(
                f"image.base.source: {local} is not a file",
                hint="give the path of a SIF image, from chain.yaml's folder or absolute",
            )
        source = _LOCAL_SOURCE
    torch = image.torch if house is None else house.version("torch") or "base"
    mirror: str | None = None
    if image.base.bootstrap == "debootstrap":
        locked_mirror = lock.base.mirror if lock is not None else None
        mirror = image.base.mirror or locked_mirror or debian_mirror()
    definition = render_base(
        image, source=source, mirror=mirror, requirements=requirements, torch=torch
    )
    if house is None:
        return BasePlan(definition, None, torch, local, None, mirror)
    document = [
        _FORMAT,
        definition,
        [[wheel.file, wheel.sha256] for wheel in house.wheels],
        None if local is None else sha256_file(local),
    ]
    content = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    path = options.cache / "images" / f"base-{content[:16]}.sif"
    plan = BasePlan(definition, content, torch, local, path, mirror)
    if lock is not None and lock.base.content != content:
        raise _another_base(plan, lock)
    return plan


def _wheels(lock: ImageLock | None) -> tuple[Wheel, ...] | None:
    return None if lock is None else lock.base.wheels


def debian_mirror() -> str:
    """Return the mirror for a debootstrap base if neither the chain nor a lock names one.

    It is the host's own if it is a Debian, else the default of its debootstrap program.
    """
    program = shutil.which("debootstrap", path=apptainer.host_environment(os.environ)["PATH"])
    if program is None:
        raise UnavailableError(
            "debootstrap is not installed, and image.base.bootstrap asks for it",
            hint="install it with the package manager, or start from another base: "
            "image.base.bootstrap docker, oras, library or localimage",
        )
    text = Path(program).read_text(encoding="utf-8", errors="replace")  # a shell script
    default = re.search(r"^DEF_MIRROR=[\"']?([^\"'\s]+)", text, re.M)
    mirror = _host_mirror() or (default and default[1])
    if mirror is None:
        raise SpecError(
            "no package mirror is known for debootstrap",
            location=("image", "base", "mirror"),
            hint="write the address of a Debian mirror there",
        )
    return mirror


def _host_mirror() -> str | None:
    """Return the address of a Debian host's main archive (not its updates') that others can use."""
    try:
        release = platform.freedesktop_os_release()
        if release["ID"] != "debian":
            return None
        # Unlike "apt-get indextargets" this needs no "apt-get update" before.
        listed = apptainer.capture(["apt-get", "--print-uris", "update"], what="listing mirrors")
    except (OSError, BuildError, UnavailableError):
        return None
    suites = "|".join((re.escape(release.get("VERSION_CODENAME", "stable")), *_ROLLING))
    address = rf"^'((?:https?|ftp|file):[^']*)/dists/(?:{suites})/main/binary-"
    match = re.search(address, listed, re.M)
    return None if match is None else match[1].rstrip("/")


def _another_base(plan: BasePlan, lock: ImageLock) -> ImageError:
    """Return the error for inputs other than the wheels that differ from the lock's."""
    if hashlib.sha256(plan.definition.encode()).hexdigest() != lock.base.definition_sha256:
        return ImageError(
            f"--locked: the chain's image settings differ from those of {LOCK_NAME}",
            hint=f"use the settings and the version of dnictl ({lock.runtime_version}) that it was "
            "made with, or build without --locked, which resolves the packages again",
        )
    return ImageError(
        f"--locked: {plan.source} is not the image that {LOCK_NAME} was made from",
        hint="copy that image here, or build without --locked",
    )


def build_base(
    tool: Apptainer,
    image: ImageSpec,
    options: BuildOptions,
    report: Reporter,
    lock: ImageLock | None,  # whose base image to reproduce exactly
) -> tuple[BasePlan, LockedBase]:
    """Make sure that the cache holds the base image."""
    options.cache.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # One after another: a second build finds the first one's base. Files are replaced as a
        # whole, so file systems without locks work, too.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(options.cache, waiting=lambda: None))
        house = wheels.prepare(image, options.cache, report=report, locked=_wheels(lock))
        plan = plan_base(image, options, house=house, lock=lock)
        assert plan.image is not None
        recorded = None if options.force else _recorded(plan.image)
        if recorded is not None:
            report(Step("base", "same", plan.image.name))
            return plan, recorded.model_copy(update={"mirror": plan.mirror})
        report(Step("base", "start", f"building {plan.image.name} with {tool}"))
        house.check_hashes()
        built = _build(tool, plan, house, report=report, test=options.test)
        size_mb = plan.image.stat().st_size / 1e6
        report(Step("base", "done", f"{plan.image.name}, {size_mb:.0f} MB"))
        return plan, built


def _build(
    tool: Apptainer, plan: BasePlan, house: Wheelhouse, *, report: Reporter, test: bool
) -> LockedBase:
    assert plan.image is not None
    assert plan.content is not None
    images = plan.image.parent
    images.mkdir(parents=True, exist_ok=True)
    with scratch_folder(images, ".build-") as scratch:
        (scratch / "wheelhouse").symlink_to(house.folder)
        if plan.source is not None:
            (scratch / _LOCAL_SOURCE).symlink_to(plan.source)
        (scratch / "base.def").write_text(plan.definition, encoding="utf-8")
        apptainer.stream(
            apptainer.build_argv(tool, "base.sif", "base.def", test=test),
            what="building the base image",
            on_line=lambda line: report(Step("base", "line", line)),
            cwd=scratch,
            log=plan.image.with_suffix(".log"),
        )
        built = scratch / "base.sif"
        record = LockedBase(
            content=plan.content,
            sha256=sha256_file(built),
            definition_sha256=hashlib.sha256(plan.definition.encode()).hexdigest(),
            torch=plan.torch,
            wheels=house.wheels,
            mirror=plan.mirror,
        )
        built.chmod(0o644)
        built.replace(plan.image)
        written = scratch / "record.json"
        written.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        written.replace(plan.image.with_suffix(".json"))
    return record


def _recorded(image: Path) -> LockedBase | None:
    try:
        record = LockedBase.model_validate_json(image.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return None
    return record if image.is_file() else None
