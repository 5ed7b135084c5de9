"""The base image: planned from settings and wheels, built once, cached by content."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dni_runtime.errors import DataError
from dni_runtime.image import apptainer, wheelhouse
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.definition import render_base
from dni_runtime.image.lock import LockedBase, LockedWheel
from dni_runtime.image.mirror import debian_mirror
from dni_runtime.image.progress import Report, Step
from dni_runtime.image.wheelhouse import Wheelhouse, sha256_file
from dni_runtime.spec import ImageSpec

_FORMAT = 1
_LOCAL_SOURCE = "source.sif"


@dataclass(frozen=True, slots=True)
class BasePlan:
    """A base image as it will be, or already is, in the cache.

    Attributes:
        definition: Its definition file.
        content: Hash of all that it is made from; None while its wheels are not resolved.
        house: Its wheels; None while they are not resolved.
        torch: torch's version, ``base``, or the requirement while it is not resolved.
        source: The image to start from, for ``localimage``.
        image: Where it is or will be in the cache; None while ``content`` is.
    """

    definition: str
    content: str | None
    house: Wheelhouse | None
    torch: str
    source: Path | None
    image: Path | None

    @property
    def ready(self) -> bool:
        """Whether the cache holds it."""
        return self.image is not None and _recorded(self.image) is not None


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where wheels and base images are kept: ``$XDG_CACHE_HOME/dnictl`` (XDG base directories)."""
    variables = os.environ if environ is None else environ
    root = variables.get("XDG_CACHE_HOME", "")
    folder = Path(root) if root.startswith("/") else Path.home() / ".cache"
    return folder / "dnictl"


def plan_base(
    image: ImageSpec, cache: Path, *, folder: Path, house: Wheelhouse | None = None
) -> BasePlan:
    """Say what the base image is made from; builds and downloads nothing.

    Args:
        image: The chain's image settings.
        cache: The cache folder.
        folder: The chain's folder, from which relative paths count.
        house: The wheels, when they were prepared; else the cache is looked up.

    Raises:
        SpecError: A setting cannot be used.
        DataError: The local base image does not exist.
        UnavailableError: debootstrap is wanted and not installed.
    """
    house = house or wheelhouse.cached(image, cache)
    requirements = wheelhouse.requirements_of(image)
    source = image.base.source
    local: Path | None = None
    if image.base.bootstrap == "localimage":
        local = (folder / Path(source).expanduser()).resolve()
        if not local.is_file():
            raise DataError(
                f"image.base.source: {local} is not a file",
                hint="give the path of a SIF image, from chain.yaml's folder or absolute",
            )
        source = _LOCAL_SOURCE
    torch = image.torch if house is None else house.version("torch") or "base"
    definition = render_base(
        image,
        source=source,
        mirror=debian_mirror(image.base) if image.base.bootstrap == "debootstrap" else None,
        requirements=requirements,
        torch=torch,
    )
    if house is None:
        return BasePlan(definition, None, None, torch, local, None)
    document = [
        _FORMAT,
        definition,
        [[wheel.file, wheel.sha256] for wheel in house.wheels],
        None if local is None else sha256_file(local),
    ]
    content = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    path = cache / "images" / f"base-{content[:16]}.sif"
    return BasePlan(definition, content, house, torch, local, path)


def build_base(
    tool: Apptainer,
    image: ImageSpec,
    cache: Path,
    *,
    folder: Path,
    report: Report,
    test: bool = True,
    force: bool = False,
) -> tuple[BasePlan, LockedBase]:
    """Make sure that the cache holds the base image.

    Args:
        tool: The container program.
        image: The chain's image settings.
        cache: The cache folder.
        folder: The chain's folder, from which relative paths count.
        report: Told what happens.
        test: Run the image's ``%test``.
        force: Build it although it is there.

    Raises:
        DniError: See :func:`plan_base`, :func:`wheelhouse.prepare` and :func:`apptainer.stream`.
    """
    with _one_at_a_time(cache / "build.lock"):
        house = wheelhouse.prepare(image, cache, report=report)
        plan = plan_base(image, cache, folder=folder, house=house)
        assert plan.image is not None
        recorded = None if force else _recorded(plan.image)
        if recorded is not None:
            report(Step("base", "same", plan.image.name))
            return plan, recorded
        report(Step("base", "start", f"building {plan.image.name} with {tool}"))
        wheelhouse.check_hashes(house)
        locked = _build(tool, plan, house, report=report, test=test)
        size_mb = plan.image.stat().st_size / 1e6
        report(Step("base", "done", f"{plan.image.name}, {size_mb:.0f} MB"))
        return plan, locked


def _build(
    tool: Apptainer, plan: BasePlan, house: Wheelhouse, *, report: Report, test: bool
) -> LockedBase:
    assert plan.image is not None
    assert plan.content is not None
    images = plan.image.parent
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=images, prefix=".build-") as name:
        scratch = Path(name)
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
        locked = LockedBase(
            content=plan.content,
            sha256=sha256_file(built),
            definition_sha256=hashlib.sha256(plan.definition.encode()).hexdigest(),
            torch=plan.torch,
            wheels=tuple(LockedWheel(**asdict(wheel)) for wheel in house.wheels),
        )
        built.chmod(0o644)
        built.replace(plan.image)
        record = scratch / "record.json"
        record.write_text(locked.model_dump_json(indent=1) + "\n", encoding="utf-8")
        record.replace(plan.image.with_suffix(".json"))
    return locked


def _recorded(image: Path) -> LockedBase | None:
    """What was written beside a cached base image when it was built."""
    try:
        record = LockedBase.model_validate_json(image.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return None
    return record if image.is_file() else None


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock while building: a second build waits and finds the first one's base image.

    Only a matter of speed, since files are replaced at once; so a file system without locks does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
