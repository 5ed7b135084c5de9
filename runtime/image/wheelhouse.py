"""The Python packages of an image: requirements, and downloaded wheels locked by hash.

Builds often lack a network, proxy settings or a CA bundle, and air-gapped clusters lack all of
them. So wheels are resolved on the host, for the image's Python and platform, and installed from a
folder. The same requirements yield the same wheels until the cache is emptied: nothing is resolved
again unnoticed. ``download`` downloads them.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from dni_runtime.errors import BuildError, SpecError
from dni_runtime.spec import ImageSpec

RUNTIME_REQUIREMENTS = (
    "numpy>=1.26",
    "pyzmq>=26",
    "msgpack>=1.0.7",
    "pydantic>=2.7",
    "PyYAML>=6.0",
    "safetensors>=0.4.3",
)
"""Packages that a worker imports beside torch; some of the distribution's dependencies."""

LOCK_NAME = "wheels.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Wheel:
    """One locked wheel."""

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Target:
    """The Python that the wheels are for."""

    python: str  # major.minor
    machine: str  # as "uname -m" names it

    @property
    def abi(self) -> str:
        """CPython's ABI tag, such as ``cp311``."""
        return "cp" + self.python.replace(".", "")

    @property
    def platforms(self) -> list[str]:
        """Platform tags that work with glibc 2.28 and newer, newest first (PEP 600)."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(28, 16, -1)]
        return [*tags, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]

    @property
    def markers(self) -> dict[str, str]:
        """The environment in which requirements' markers are evaluated (PEP 508)."""
        environment = {k: str(v) for k, v in default_environment().items()}
        return environment | {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_machine": self.machine,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "extra": "",
        }


@dataclass(frozen=True, slots=True)
class Wheelhouse:
    """A folder of wheels."""

    folder: Path
    requirements: tuple[str, ...]  # to install
    wheels: tuple[Wheel, ...]  # sorted by name

    def version(self, name: str) -> str | None:
        """Return the version of a package, or None if it is not included."""
        wanted = canonicalize_name(name)
        return next((w.version for w in self.wheels if w.name == wanted), None)


def requirements_of(image: ImageSpec) -> tuple[str, ...]:
    """Return the requirements that an image installs, as written."""
    torch = () if image.torch == "base" else (image.torch,)
    places: list[tuple[tuple[str | int, ...], str]] = [(("image", "torch"), t) for t in torch]
    places += [(("image", "requirements", i), r) for i, r in enumerate(image.requirements)]
    for location, text in places:
        try:
            name = Requirement(text).name
        except InvalidRequirement as error:
            raise SpecError(
                f"{text!r} is not a requirement: {error}",
                location=location,
                hint="write a package with a version, such as 'torch==2.13.0' or 'einops>=0.8'",
            ) from error
        if location[1] == "torch" and canonicalize_name(name) != "torch":
            raise SpecError(f"{text!r} does not name torch", location=location)
    return (*torch, *RUNTIME_REQUIREMENTS, *image.requirements)


def host_machine() -> str:
    """Return the machine type that images are built for: that of this host."""
    return platform.machine()


def cache_key(
    requirements: Sequence[str],
    index: str | None,
    target: Target,
    locked: Sequence[Wheel] | None = None,
) -> str:
    """Return the name of a resolved set of wheels in the cache."""
    document = [_FORMAT, sorted(requirements), index, target.python, target.machine]
    if locked is not None:
        document.append(sorted(wheel.sha256 for wheel in locked))
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16]


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan(folder: Path) -> tuple[Wheel, ...]:
    """Return the wheels in a folder."""
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        name, version, _build, _tags = parse_wheel_filename(path.name)
        wheels.append(Wheel(name, str(version), path.name, sha256_file(path)))
    return tuple(wheels)


def read_lock(folder: Path, requirements: Sequence[str]) -> Wheelhouse | None:
    """Return the wheelhouse in a folder if it is complete, else None."""
    try:
        document = json.loads((folder / LOCK_NAME).read_text(encoding="utf-8"))
        wheels = tuple(Wheel(**entry) for entry in document["wheels"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all((folder / wheel.file).is_file() for wheel in wheels):
        return None
    return Wheelhouse(folder, tuple(requirements), wheels)


def cached(
    image: ImageSpec,
    cache: Path,
    *,
    machine: str | None = None,
    locked: Sequence[Wheel] | None = None,
) -> Wheelhouse | None:
    """Return the image's wheels, or the ``locked`` ones, if they were downloaded before."""
    requirements = requirements_of(image)
    target = Target(image.base.python, machine or host_machine())
    for names in (None,) if locked is None else (None, locked):
        key = cache_key(requirements, image.torch_index, target, names)
        house = read_lock(cache / "wheels" / key, requirements)
        if house is not None and (locked is None or set(house.wheels) == set(locked)):
            return house
    return None


def check_hashes(house: Wheelhouse) -> None:
    """Compare the wheels with their lock."""
    for wheel in house.wheels:
        if sha256_file(house.folder / wheel.file) != wheel.sha256:
            raise BuildError(
                f"{house.folder / wheel.file} is not the file that was downloaded",
                hint=f"remove {house.folder} and build again",
            )
