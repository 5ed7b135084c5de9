"""Downloading an image's Python packages with pip: newly resolved, or as a lock names them.

Only the index of torch builds (``image.torch_index``) is queried for :data:`TORCHS_OWN` and what
they pin, and it is queried for nothing else: a package of the same name elsewhere cannot replace
them, and that index cannot replace other packages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from dni_runtime.errors import BuildError, UnavailableError
from dni_runtime.image import apptainer
from dni_runtime.image.progress import Report, Step
from dni_runtime.image.wheelhouse import (
    LOCK_NAME,
    Target,
    Wheel,
    Wheelhouse,
    cache_key,
    cached,
    host_machine,
    requirements_of,
    scan,
)
from dni_runtime.spec import ImageSpec

INSTALLER = "pip"
"""Included in the wheelhouse, so that the image needs no pip of its own."""

TORCHS_OWN = frozenset({"torch", "torchvision", "torchaudio"})
"""Packages from an index of torch builds, beside the dependencies that these pin."""

_ROUNDS = 5


def prepare(
    image: ImageSpec,
    cache: Path,
    *,
    report: Report,
    machine: str | None = None,  # the images' machine type; default: this host's
    locked: Sequence[Wheel] | None = None,  # exactly these, by hash; nothing is resolved
) -> Wheelhouse:
    """Download the image's wheels to ``wheels/<key>`` in the cache, or find them there."""
    if (found := cached(image, cache, machine=machine, locked=locked)) is not None:
        report(Step("wheels", "same", f"{len(found.wheels)} wheels"))
        return found
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(
            f"{sys.executable} has no pip, which downloads the images' packages",
            hint=f"run: {sys.executable} -m ensurepip",
        )
    requirements = requirements_of(image)
    target = Target(image.base.python, machine or host_machine())
    final = cache / "wheels" / cache_key(requirements, image.torch_index, target, locked)
    final.parent.mkdir(parents=True, exist_ok=True)
    report(Step("wheels", "start", f"downloading for Python {target.python}, {target.machine}"))
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".new-") as name:
        folder = Path(name) / "wheels"
        folder.mkdir()
        if locked is None:
            _download(requirements, image, folder, target, report)
        else:
            _download_locked(locked, image, folder, target, report)
        wheels = scan(folder)
        lock = json.dumps({"wheels": [asdict(wheel) for wheel in wheels]}, indent=1)
        (folder / LOCK_NAME).write_text(lock + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    house = Wheelhouse(final, requirements, wheels)
    report(Step("wheels", "done", f"{len(wheels)} wheels, torch {house.version('torch') or '-'}"))
    return house


def _run_pip(argv: list[str], report: Report, **settings: str) -> None:
    apptainer.stream(
        argv,
        what="downloading the images' Python packages",
        on_line=lambda line: report(Step("wheels", "line", line)),
        environ={**os.environ, **settings},
    )


def _download(
    requirements: Sequence[str], image: ImageSpec, folder: Path, target: Target, report: Report
) -> None:
    wanted = [*requirements, INSTALLER]
    if (index := image.torch_index) is not None:
        own = [r for r in wanted if canonicalize_name(Requirement(r).name) in TORCHS_OWN]
        wanted = [r for r in wanted if r not in own]
        while own:
            # Override pip's other indexes: they hold other builds, or newer versions.
            argv = download_argv(own, folder, target, only_index=index, dependencies=False)
            _run_pip(argv, report, PIP_EXTRA_INDEX_URL=index, PIP_FIND_LINKS=str(folder))
            own = [r for r in missing_requirements(folder, target) if "==" in r]
        # As files, so that no other index is queried for them.
        wanted += [f"{wheel.name} @ {(folder / wheel.file).as_uri()}" for wheel in scan(folder)]
    missing = wanted
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
    locked: Sequence[Wheel], image: ImageSpec, folder: Path, target: Target, report: Report
) -> None:
    """Download only these wheels; pip compares each with its hash, whichever index it is from."""
    lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in locked]
    hashes = folder.with_name("requirements.txt")
    hashes.write_text("".join(lines), encoding="utf-8")
    indexes = () if image.torch_index is None else (image.torch_index,)
    _run_pip(
        download_argv([], folder, target, indexes=indexes, dependencies=False, hashes=hashes),
        report,
    )
    if set(found := scan(folder)) != set(locked):
        others = sorted({wheel.file for wheel in set(found) ^ set(locked)})
        raise BuildError(
            f"the downloaded wheels differ from those in dni.lock: {', '.join(others)}",
            hint="build without --locked, which resolves the packages again",
        )


def download_argv(
    requirements: Sequence[str],
    folder: Path,
    target: Target,
    *,
    indexes: Sequence[str] = (),  # beside pip's own
    only_index: str | None = None,
    dependencies: bool = True,
    hashes: Path | None = None,  # of further requirements; only wheels with these are accepted
) -> list[str]:
    """Return ``pip download`` for another Python than the one it runs on (pip's documentation)."""
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
    if hashes is not None:
        argv += ["--require-hashes", "--requirement", str(hashes)]
    return [*argv, "--", *requirements]


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
    found = []
    for field in fields:
        with contextlib.suppress(InvalidRequirement):  # legacy spellings in optional extras
            found.append(Requirement(field))
    return found
