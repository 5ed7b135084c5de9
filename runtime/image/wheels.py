"""The Python packages of an image: requirements, and wheels that pip downloads, locked by hash.

Builds often lack a network, proxy settings or a CA bundle, and air-gapped clusters lack all of
them. So wheels are resolved on the host, for the image's Python and platform, and installed from a
folder. The same requirements yield the same wheels until the cache is emptied: nothing is resolved
again unnoticed.

Only the index of torch builds (``image.torch_index``) is queried for :data:`TORCHS_OWN` and what
they pin, and it is queried for nothing else: a package of the same name elsewhere cannot replace
them, and that index cannot replace other packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from pydantic import TypeAdapter

from dni_runtime.errors import BuildError, SpecError, UnavailableError
from dni_runtime.image import apptainer
from dni_runtime.image.lock import Wheel
from dni_runtime.image.progress import Reporter, Step
from dni_runtime.image.scratch import scratch_folder
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

FRONT_REQUIREMENTS = ("uvicorn>=0.30", "httptools>=0.6", "uvloop>=0.19", "orjson>=3.10")
"""Packages that the front of a service imports besides; those of the extra ``serve``."""

INSTALLER = "pip"
"""Included in the wheelhouse, so that the image needs no pip of its own."""

TORCHS_OWN = frozenset({"torch", "torchvision", "torchaudio"})
"""Packages from an index of torch builds, beside the dependencies that these pin."""

LOCK_NAME = "wheels.json"
_LOCK = TypeAdapter(tuple[Wheel, ...])
_FORMAT = 2
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Target:
    """The Python that the wheels are for."""

    python: str  # major.minor
    machine: str  # as "uname -m" names it

    @property
    def platforms(self) -> list[str]:
        """Platform tags that work with glibc 2.28 and newer, newest first (PEP 600)."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(28, 16, -1)]
        return [*tags, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]

    @property
    def markers(self) -> dict[str, str]:
        """The environment in which requirements' markers are evaluated (PEP 508)."""
        return {k: str(v) for k, v in default_environment().items()} | {
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
    folder: Path
    wheels: tuple[Wheel, ...]  # sorted by name

    def version(self, name: str) -> str | None:
        """Return the version of a package, or None if it is not included."""
        return next((w.version for w in self.wheels if w.name == canonicalize_name(name)), None)

    def check_hashes(self) -> None:
        """Compare the wheels with their lock."""
        for wheel in self.wheels:
            if sha256_file(self.folder / wheel.file) != wheel.sha256:
                raise BuildError(
                    f"{self.folder / wheel.file} is not the file that was downloaded",
                    hint=f"remove {self.folder} and build again",
                )


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
    return (*torch, *RUNTIME_REQUIREMENTS, *FRONT_REQUIREMENTS, *image.requirements)


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan(folder: Path) -> tuple[Wheel, ...]:
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        name, version, _build, _tags = parse_wheel_filename(path.name)
        digest = sha256_file(path)
        wheels.append(Wheel(name=name, version=str(version), file=path.name, sha256=digest))
    return tuple(wheels)


def read_wheelhouse(folder: Path) -> Wheelhouse | None:
    """Return the wheelhouse in a folder if it is complete, else None."""
    try:
        wheels = _LOCK.validate_json((folder / LOCK_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    complete = all((folder / wheel.file).is_file() for wheel in wheels)
    return Wheelhouse(folder, wheels) if complete else None


def cached(
    image: ImageSpec, cache: Path, locked: Sequence[Wheel] | None = None
) -> Wheelhouse | None:
    """Return the image's wheels, or the ``locked`` ones, if they were downloaded before."""
    requirements = requirements_of(image)
    target = Target(image.base.python, host_machine())
    for names in (None,) if locked is None else (None, locked):
        key = cache_key(requirements, image.torch_index, target, names)
        house = read_wheelhouse(cache / "wheels" / key)
        if house is not None and (locked is None or set(house.wheels) == set(locked)):
            return house
    return None


def prepare(
    image: ImageSpec,
    cache: Path,
    *,
    report: Reporter,
    locked: Sequence[Wheel] | None = None,  # exactly these, by hash; nothing is resolved
) -> Wheelhouse:
    """Download the image's wheels to ``wheels/<key>`` in the cache, or find them there."""
    if (wheelhouse := cached(image, cache, locked)) is not None:
        report(Step("wheels", "same", f"{len(wheelhouse.wheels)} wheels"))
        return wheelhouse
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(
            f"{sys.executable} has no pip, which downloads the images' packages",
            hint=f"run: {sys.executable} -m ensurepip",
        )
    requirements = requirements_of(image)
    target = Target(image.base.python, host_machine())
    final = cache / "wheels" / cache_key(requirements, image.torch_index, target, locked)
    final.parent.mkdir(parents=True, exist_ok=True)
    report(Step("wheels", "start", f"downloading for Python {target.python}, {target.machine}"))
    with scratch_folder(final.parent, ".new-") as scratch:
        folder = scratch / "wheels"
        folder.mkdir()
        if locked is None:
            _download(requirements, image, folder, target, report)
        else:
            _download_locked(locked, image, folder, target, report)
        house = Wheelhouse(final, scan(folder))
        (folder / LOCK_NAME).write_bytes(_LOCK.dump_json(house.wheels, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    version = house.version("torch") or "-"
    report(Step("wheels", "done", f"{len(house.wheels)} wheels, torch {version}"))
    return house


def _run_pip(argv: list[str], report: Reporter, **settings: str) -> None:
    apptainer.stream(
        argv,
        what="downloading the images' Python packages",
        on_line=lambda line: report(Step("wheels", "line", line)),
        environ={**os.environ, **settings},
    )


def _download(
    requirements: Sequence[str], image: ImageSpec, folder: Path, target: Target, report: Reporter
) -> None:
    packages = [*requirements, INSTALLER]
    if (index := image.torch_index) is not None:
        from_index = [r for r in packages if canonicalize_name(Requirement(r).name) in TORCHS_OWN]
        packages = [r for r in packages if r not in from_index]
        while from_index:
            # Override pip's other indexes: they hold other builds, or newer versions.
            argv = download_argv(from_index, folder, target, ["--index-url", index, "--no-deps"])
            _run_pip(argv, report, PIP_EXTRA_INDEX_URL=index, PIP_FIND_LINKS=str(folder))
            from_index = [r for r in missing_requirements(folder, target) if "==" in r]
        # As files, so that no other index is queried for them.
        packages += [f"{wheel.name} @ {(folder / wheel.file).as_uri()}" for wheel in scan(folder)]
    missing = packages
    for _round in range(1 + _ROUNDS):
        _run_pip(download_argv(missing, folder, target), report)
        if not (missing := missing_requirements(folder, target)):
            return
    raise BuildError(
        "the images' Python packages cannot be resolved",
        tail=missing,
        hint="add the missing packages to image.requirements",
    )


def _download_locked(
    locked: Sequence[Wheel], image: ImageSpec, folder: Path, target: Target, report: Reporter
) -> None:
    """Download only these wheels; pip compares each with its hash, whichever index it is from."""
    lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in locked]
    hashes = folder.with_name("requirements.txt")
    hashes.write_text("".join(lines), encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--requirement", str(hashes)]
    if image.torch_index is not None:
        options += ["--extra-index-url", image.torch_index]
    _run_pip(download_argv([], folder, target, options), report)
    if set(wheels := scan(folder)) != set(locked):
        others = sorted({wheel.file for wheel in set(wheels) ^ set(locked)})
        raise BuildError(
            f"the downloaded wheels differ from those in dni.lock: {', '.join(others)}",
            hint="build without --locked, which resolves the packages again",
        )


def download_argv(
    requirements: Sequence[str], folder: Path, target: Target, options: Sequence[str] = ()
) -> list[str]:
    """Return ``pip download`` for another Python than the one it runs on (pip's documentation)."""
    argv = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar", "off", "--only-binary=:all:", "--dest", str(folder)]
    argv += ["--find-links", str(folder), "--implementation", "cp"]
    argv += ["--python-version", target.python]
    for abi in (f"cp{target.python.replace('.', '')}", "abi3", "none"):
        argv += ["--abi", abi]
    for tag in target.platforms:
        argv += ["--platform", tag]
    return [*argv, *options, "--", *requirements]


def missing_requirements(folder: Path, target: Target) -> list[str]:
    """Return the requirements of a folder's wheels, under the image's Python, that it lacks.

    pip evaluates markers such as ``python_version < "3.13"`` for the Python that it runs on.
    """
    present: set[str] = set()
    needed: list[Requirement] = []
    for path in sorted(folder.glob("*.whl")):
        present.add(parse_wheel_filename(path.name)[0])
        needed += _needs(path)
    markers = target.markers
    return sorted(
        {
            str(Requirement(f"{r.name}{r.specifier}"))
            for r in needed
            if canonicalize_name(r.name) not in present
            and (r.marker is None or r.marker.evaluate(markers))
        }
    )


def _needs(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        inside = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(inside[0]).decode("utf-8", "replace")
    fields = HeaderParser().parsestr(text).get_all("Requires-Dist") or []
    requirements = []
    for field in fields:
        with contextlib.suppress(InvalidRequirement):  # legacy spellings in optional extras
            requirements.append(Requirement(field))
    return requirements
