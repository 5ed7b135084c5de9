"""The Python packages of an image, downloaded on the host and locked by hash.

Inside a build there is often no network, no proxy setting or no CA bundle, and air-gapped clusters
have none at all. So wheels are resolved here, for the image's Python and platform rather than the
host's, and installed from a folder. The same requirements give the same wheels until the cache is
emptied: nothing is resolved anew behind the user's back.
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
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from dni_runtime.errors import BuildError, SpecError, UnavailableError
from dni_runtime.image import apptainer
from dni_runtime.image.progress import Report, Step
from dni_runtime.spec import ImageSpec

RUNTIME_REQUIREMENTS = (
    "numpy>=1.26",
    "pyzmq>=26",
    "msgpack>=1.0.7",
    "pydantic>=2.7",
    "PyYAML>=6.0",
    "safetensors>=0.4.3",
)
"""What a worker imports beside torch; a part of the distribution's own dependencies."""

INSTALLER = "pip"
"""Travels in the wheelhouse, so that the image needs no pip of its own."""

_LOCK = "wheels.json"
_FORMAT = 1
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Wheel:
    """One locked wheel."""

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Target:
    """The Python that the wheels are for.

    Attributes:
        python: ``major.minor``.
        machine: As ``uname -m`` names it.
    """

    python: str
    machine: str

    @property
    def abi(self) -> str:
        """CPython's ABI tag, such as ``cp311``."""
        return "cp" + self.python.replace(".", "")

    @property
    def platforms(self) -> list[str]:
        """Platform tags that glibc 2.28 and newer run, newest first (PEP 600)."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(28, 16, -1)]
        return [*tags, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]

    @property
    def markers(self) -> dict[str, str]:
        """The environment in which requirements' markers are judged (PEP 508)."""
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
    """A folder of wheels and what is in it.

    Attributes:
        folder: Where they lie.
        requirements: What to install.
        wheels: What is there, sorted by name.
    """

    folder: Path
    requirements: tuple[str, ...]
    wheels: tuple[Wheel, ...]

    def version(self, name: str) -> str | None:
        """The version of a package, or None when it is not there."""
        wanted = canonicalize_name(name)
        return next((w.version for w in self.wheels if w.name == wanted), None)


def requirements_of(image: ImageSpec) -> tuple[str, ...]:
    """What an image installs, in its own words.

    Raises:
        SpecError: A requirement is malformed (PEP 508).
    """
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
    """The machine that images are built for: this one's kind."""
    return platform.machine()


def cache_key(requirements: Sequence[str], index: str | None, target: Target) -> str:
    """Names a resolved set of wheels in the cache."""
    document = [_FORMAT, sorted(requirements), index, target.python, target.machine]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16]


def download_argv(
    requirements: Sequence[str],
    folder: Path,
    target: Target,
    *,
    indexes: Sequence[str] = (),
    only_index: str | None = None,
    dependencies: bool = True,
) -> list[str]:
    """``pip download`` for another Python than the one it runs on (pip's documentation)."""
    argv = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar", "off", "--only-binary=:all:", "--dest", str(folder)]
    argv += ["--find-links", str(folder), "--implementation", "cp"]
    argv += ["--python-version", target.python]
    for abi in (target.abi, "abi3", "none"):
        argv += ["--abi", abi]
    for tag in target.platforms:
        argv += ["--platform", tag]
    if only_index is not None:
        argv += ["--index-url", only_index]
    for index in indexes:
        argv += ["--extra-index-url", index]
    if not dependencies:
        argv.append("--no-deps")
    return [*argv, "--", *requirements]


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan(folder: Path) -> tuple[Wheel, ...]:
    """The wheels in a folder."""
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        name, version, _build, _tags = parse_wheel_filename(path.name)
        wheels.append(Wheel(name, str(version), path.name, sha256_file(path)))
    return tuple(wheels)


def missing_requirements(folder: Path, target: Target) -> list[str]:
    """What the wheels in a folder need under the image's Python and the folder lacks.

    pip judges markers such as ``python_version < "3.13"`` by the Python that it runs on.
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
    found = []
    for field in fields:
        with contextlib.suppress(InvalidRequirement):  # legacy spellings in optional extras
            found.append(Requirement(field))
    return found


def read_lock(folder: Path, requirements: Sequence[str]) -> Wheelhouse | None:
    """The wheelhouse in a folder if it is whole, else None."""
    try:
        document = json.loads((folder / _LOCK).read_text(encoding="utf-8"))
        wheels = tuple(Wheel(**entry) for entry in document["wheels"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all((folder / wheel.file).is_file() for wheel in wheels):
        return None
    return Wheelhouse(folder, tuple(requirements), wheels)


def cached(image: ImageSpec, cache: Path, *, machine: str | None = None) -> Wheelhouse | None:
    """The image's wheels if they were downloaded before; touches no network."""
    requirements = requirements_of(image)
    target = Target(image.base.python, machine or host_machine())
    key = cache_key(requirements, image.torch_index, target)
    return read_lock(cache / "wheels" / key, requirements)


def prepare(
    image: ImageSpec, cache: Path, *, report: Report, machine: str | None = None
) -> Wheelhouse:
    """Download the image's wheels, or find them in the cache.

    Args:
        image: The chain's image settings.
        cache: The cache folder; the wheels go to ``wheels/<key>`` below it.
        report: Told what happens.
        machine: The images' machine (default: this one's).

    Raises:
        SpecError: A requirement is malformed.
        UnavailableError: This Python has no pip.
        BuildError: The wheels cannot be downloaded.
    """
    if (found := cached(image, cache, machine=machine)) is not None:
        report(Step("wheels", "same", f"{len(found.wheels)} wheels"))
        return found
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(
            f"{sys.executable} has no pip, which downloads the images' packages",
            hint=f"run: {sys.executable} -m ensurepip",
        )
    requirements = requirements_of(image)
    target = Target(image.base.python, machine or host_machine())
    final = cache / "wheels" / cache_key(requirements, image.torch_index, target)
    final.parent.mkdir(parents=True, exist_ok=True)
    report(Step("wheels", "start", f"downloading for Python {target.python}, {target.machine}"))
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".new-") as name:
        folder = Path(name) / "wheels"
        folder.mkdir()
        _download(requirements, image, folder, target, report)
        wheels = scan(folder)
        lock = json.dumps({"wheels": [asdict(wheel) for wheel in wheels]}, indent=1)
        (folder / _LOCK).write_text(lock + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    house = Wheelhouse(final, requirements, wheels)
    report(Step("wheels", "done", f"{len(wheels)} wheels, torch {house.version('torch') or '-'}"))
    return house


def _download(
    requirements: Sequence[str], image: ImageSpec, folder: Path, target: Target, report: Report
) -> None:
    def run(argv: list[str], **settings: str) -> None:
        apptainer.stream(
            argv,
            what="downloading the images' Python packages",
            on_line=lambda line: report(Step("wheels", "line", line)),
            environ={**os.environ, **settings},
        )

    index = image.torch_index
    extra: Iterable[str] = () if index is None else (index,)
    wanted = [*requirements, INSTALLER]
    if index is not None and image.torch != "base":
        # torch itself from its own index alone, whatever pip's settings name beside it: elsewhere
        # the same version is another build, or a newer one.
        argv = download_argv([image.torch], folder, target, only_index=index, dependencies=False)
        run(argv, PIP_EXTRA_INDEX_URL=index, PIP_FIND_LINKS=str(folder))
        torch = scan(folder)[0]
        wanted[0] = f"torch=={torch.version}"
    run(download_argv(wanted, folder, target, indexes=list(extra)))
    for _round in range(_ROUNDS):
        missing = missing_requirements(folder, target)
        if not missing:
            return
        run(download_argv(missing, folder, target, indexes=list(extra)))
    raise BuildError(
        "the images' Python packages cannot be resolved",
        tail=missing,
        hint="add the missing packages to image.requirements",
    )


def check_hashes(house: Wheelhouse) -> None:
    """Compare the wheels with their lock.

    Raises:
        BuildError: A wheel was altered since it was downloaded.
    """
    for wheel in house.wheels:
        if sha256_file(house.folder / wheel.file) != wheel.sha256:
            raise BuildError(
                f"{house.folder / wheel.file} is not the file that was downloaded",
                hint=f"remove {house.folder} and build again",
            )
