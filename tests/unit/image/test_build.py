"""Planning builds: what is rebuilt, and why."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dni_runtime.errors import BuildError, DataError, ImageError, UnavailableError
from dni_runtime.image import base, build, check, layers, plan, wheels
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.base import BuildOptions
from dni_runtime.image.layers import ModuleBuild
from dni_runtime.image.lock import (
    ImageLock,
    LockedBase,
    LockedImage,
    Wheel,
    read_lock,
    write_lock,
)
from dni_runtime.image.wheels import Wheelhouse
from dni_runtime.spec import BaseSpec, ImageSpec

WHEEL = Wheel(name="torch", version="2.13.0", file="torch-2.13.0-py3-none-any.whl", sha256="0" * 64)


@pytest.fixture
def image(tmp_path: Path) -> ImageSpec:
    (tmp_path / "start.sif").write_bytes(b"start")
    return ImageSpec(
        torch="torch==2.13.0", base=BaseSpec(bootstrap="localimage", source="start.sif")
    )


@pytest.fixture
def options(tmp_path: Path, image: ImageSpec, monkeypatch: pytest.MonkeyPatch) -> BuildOptions:
    """A build whose wheels are resolved already."""
    house = Wheelhouse(tmp_path / "wheels", (WHEEL,))
    monkeypatch.setattr(wheels, "cached", lambda *_args, **_kwargs: house)
    out = tmp_path / "images"
    out.mkdir()
    return BuildOptions(out=out, cache=tmp_path / "cache", folder=tmp_path)


def module(name: str, hash_: str = "a") -> ModuleBuild:
    worker: Any = SimpleNamespace(module=name, chain="c", hash=hash_ * 64, to_json=lambda: "{}")
    return ModuleBuild(worker, {})


def reasons(
    modules: list[ModuleBuild], image: ImageSpec, options: BuildOptions
) -> list[str | None]:
    return [p.reason for p in plan.plan_build(modules, image, options).modules]


def built(modules: list[ModuleBuild], image: ImageSpec, options: BuildOptions) -> ImageLock:
    """Leave behind what a build would: images and a lock."""
    planned = plan.plan_build(modules, image, options)
    entries = {}
    for entry in planned.modules:
        content = entry.module.name.encode()
        (options.out / f"{entry.module.name}.sif").write_bytes(content)
        assert entry.content is not None
        entries[entry.module.name] = LockedImage(
            image=f"{entry.module.name}.sif",
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            mtime_ns=(options.out / f"{entry.module.name}.sif").stat().st_mtime_ns,
            content=entry.content,
            module_hash=entry.module.hash,
            sources=layers.source_digests(entry.files),
            method=options.method,
        )
    assert planned.base.content is not None
    locked_base = LockedBase(
        content=planned.base.content,
        sha256="1",
        definition_sha256=hashlib.sha256(planned.base.definition.encode()).hexdigest(),
        torch="2",
        wheels=(),
        mirror=planned.base.mirror,
    )
    lock = ImageLock(
        chain="c", builder="b", runtime_version="0.1.0", base=locked_base, modules=entries
    )
    write_lock(options.out, lock)
    return lock


def test_a_lock_that_cannot_be_written_leaves_nothing(
    image: ImageSpec, options: BuildOptions
) -> None:
    lock = built([module("head")], image, options)
    before, limit = sorted(options.out.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=r"dni\.lock"):
            write_lock(options.out, lock)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(options.out.iterdir()) == before
    assert read_lock(options.out) == lock


def test_only_what_changed_is_built(image: ImageSpec, options: BuildOptions) -> None:
    modules = [module("head"), module("body"), module("tail")]
    assert reasons(modules, image, options) == ["not built yet"] * 3
    built(modules, image, options)
    assert reasons(modules, image, options) == [None] * 3
    assert reasons([modules[0], module("body", "b"), modules[2]], image, options) == [
        None,
        "changed",
        None,
    ]
    assert reasons([*modules, module("more")], image, options)[3] == "not built yet"
    assert reasons(modules, image, replace(options, full=True)) == ["changed"] * 3
    assert reasons(modules, image, replace(options, force=True)) == ["--force"] * 3


def test_a_new_base_changes_every_image(
    image: ImageSpec, options: BuildOptions, tmp_path: Path
) -> None:
    modules = [module("head"), module("tail")]
    built(modules, image, options)
    (tmp_path / "start.sif").write_bytes(b"another start")
    assert reasons(modules, image, options) == ["changed"] * 2


def test_missing_and_altered_images_are_built(image: ImageSpec, options: BuildOptions) -> None:
    modules = [module("head"), module("body"), module("tail")]
    built(modules, image, options)
    (options.out / "head.sif").unlink()
    path = options.out / "body.sif"
    path.write_bytes(b"BODY")
    os.utime(path, (2**32, 2**32))  # newer than the lock
    assert reasons(modules, image, options) == ["missing", "altered since it was built", None]


def test_another_image_that_is_older_is_found(image: ImageSpec, options: BuildOptions) -> None:
    """As of a copy that keeps times: 'up' reads it in full, and says to build it."""
    lock = built([module("head")], image, options)
    path = options.out / "head.sif"
    before = path.stat()
    path.write_bytes(b"HEAD")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))
    assert reasons([module("head")], image, options) == ["altered since it was built"]
    path.write_bytes(b"head")
    assert reasons([module("head")], image, options) == [None]
    # The lock of another build, as of a version control.
    entry = lock.modules["head"].model_copy(update={"sha256": "0" * 64, "mtime_ns": 1})
    write_lock(options.out, lock.model_copy(update={"modules": {"head": entry}}))
    assert reasons([module("head")], image, options) == ["altered since it was built"]
    # One of before locks said of which code an image is.
    entry = lock.modules["head"].model_copy(update={"sources": None})
    write_lock(options.out, lock.model_copy(update={"modules": {"head": entry}}))
    assert reasons([module("head")], image, options) == ["changed"]


def test_what_is_signed(image: ImageSpec, options: BuildOptions) -> None:
    lock = built([module("head")], image, options)

    def planned(**how: Any) -> tuple[str | None, bool]:
        (one,) = plan.plan_build([module("head")], image, replace(options, **how)).modules
        return one.reason, one.sign

    pem = {"sign": True, "key": options.out / "private.pem"}
    assert planned(sign=True) == planned(**pem) == (None, True)
    assert planned(force=True) == ("--force", False)
    entry = lock.modules["head"].model_copy(update={"signed": "pgp"})
    write_lock(options.out, lock.model_copy(update={"modules": {"head": entry}}))
    assert planned() == planned(sign=True) == (None, False)
    assert planned(**pem) == ("signed otherwise", True)


def test_another_pem_key_signs_again(
    image: ImageSpec, options: BuildOptions, tmp_path: Path
) -> None:
    """The old one may be rotated, or known to others."""
    lock = built([module("head")], image, options)
    old, new = (tmp_path / name for name in ("old.pem", "new.pem"))
    for key in (old, new):
        key.write_text(key.name)
    signed = replace(options, sign=True, key=old)
    entry = lock.modules["head"].model_copy(update={"signed": "pem", "signer": signed.signer})
    write_lock(options.out, lock.model_copy(update={"modules": {"head": entry}}))
    assert reasons([module("head")], image, options) == [None]
    assert reasons([module("head")], image, signed) == [None]
    assert reasons([module("head")], image, replace(signed, key=new)) == ["signed by another key"]
    # Nobody knows who has signed an image of before locks said it.
    entry = lock.modules["head"].model_copy(update={"signed": "pem"})
    write_lock(options.out, lock.model_copy(update={"modules": {"head": entry}}))
    assert reasons([module("head")], image, signed) == ["signed by another key"]


def test_a_touched_image_with_the_same_content_is_kept(
    image: ImageSpec, options: BuildOptions
) -> None:
    built([module("head")], image, options)
    os.utime(options.out / "head.sif", (2**32, 2**32))
    assert reasons([module("head")], image, options) == [None]


def test_base_hash_follows_definition_and_wheels(
    image: ImageSpec, options: BuildOptions, tmp_path: Path
) -> None:
    def content(spec: ImageSpec, wheel: Wheel = WHEEL) -> str | None:
        house = Wheelhouse(tmp_path, (wheel,))
        return base.plan_base(spec, options, house=house).content

    first = content(image)
    assert first == content(image)
    more = image.model_copy(update={"environment": {"A": "1"}})
    assert (
        len({first, content(more), content(image, WHEEL.model_copy(update={"sha256": "1" * 64}))})
        == 3
    )


def test_without_wheels_nothing_is_known_to_be_up_to_date(
    image: ImageSpec, options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    built([module("head")], image, options)
    monkeypatch.setattr(wheels, "cached", lambda *_args, **_kwargs: None)
    planned = plan.plan_build([module("head")], image, options)
    assert planned.base.image is None
    assert not planned.base.ready
    assert planned.modules[0].reason == "changed"


def test_a_lock_is_kept(image: ImageSpec, options: BuildOptions, tmp_path: Path) -> None:
    keep = replace(options, locked=True)
    with pytest.raises(DataError, match=r"--locked: .*dni\.lock does not exist\n.*copy"):
        reasons([module("head")], image, keep)
    built([module("head")], image, options)
    assert reasons([module("head", "b"), module("tail")], image, keep) == [
        "changed",  # whoever keeps the packages may change the modules
        "not built yet",
    ]
    more = image.model_copy(update={"packages": ("libibverbs1",)})
    with pytest.raises(ImageError, match=r"image settings differ from .* dni\.lock\n.*0\.1\.0"):
        reasons([module("head")], more, keep)
    (tmp_path / "start.sif").write_bytes(b"another start")
    with pytest.raises(ImageError, match=r"start\.sif is not the image that dni\.lock was made fr"):
        reasons([module("head")], image, keep)


def test_a_lock_is_kept_beside_another_mirror(
    image: ImageSpec, options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image.model_copy(update={"base": BaseSpec()})
    monkeypatch.setattr(base, "debian_mirror", lambda: "http:/first/debian")
    built([module("head")], image, options)
    monkeypatch.setattr(base, "debian_mirror", lambda: "http:/second/debian")
    assert reasons([module("head")], image, options) == ["changed"]
    assert reasons([module("head")], image, replace(options, locked=True)) == [None]
    image = image.model_copy(update={"base": BaseSpec(mirror="mine:/debian")})
    assert base.plan_base(image, options).mirror == "mine:/debian"


def test_missing_local_base_is_an_error(options: BuildOptions) -> None:
    image = ImageSpec(base=BaseSpec(bootstrap="localimage", source="gone.sif"))
    with pytest.raises(DataError, match=r"gone\.sif is not a file"):
        plan.plan_build([module("head")], image, options)


def test_root_does_not_build(
    image: ImageSpec, options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tool = Apptainer(Path("/none"), "apptainer", (1, 4, 5))
    with pytest.raises(UnavailableError, match="ordinary user"):
        build.build_images([module("head")], image, options, tool=tool)


def test_folder_that_cannot_be_written_is_no_bug(
    image: ImageSpec, options: BuildOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "file").write_text("")
    tool = Apptainer(Path("/none"), "apptainer", (1, 4, 5))
    bad = replace(options, out=tmp_path / "file" / "images")
    with pytest.raises(BuildError, match=r"file/images.*\n.*write permission"):
        build.build_images([module("head")], image, bad, tool=tool)


def test_lock_is_read_back(image: ImageSpec, options: BuildOptions) -> None:
    lock = built([module("head")], image, options)
    assert read_lock(options.out) == lock
    assert [p.name for p in options.out.iterdir() if p.name.startswith(".")] == []


def test_broken_lock_says_what_to_do(tmp_path: Path) -> None:
    assert read_lock(tmp_path) is None
    (tmp_path / "dni.lock").write_text('{"format": 7}')
    with pytest.raises(ImageError, match="remove it and build"):
        read_lock(tmp_path)


def test_verification_compares_hashes(image: ImageSpec, options: BuildOptions) -> None:
    built([module("head"), module("tail")], image, options)
    paths = check.locked_images(options.out)
    assert [p.name for p in paths] == ["head.sif", "tail.sif"]
    assert not check.verify_image(paths[0]).signed
    paths[0].write_bytes(b"HEAD")
    with pytest.raises(ImageError, match="not the image that was built"):
        check.verify_image(paths[0])
    with pytest.raises(ImageError, match="not signed"):
        check.verify_image(paths[1], require_signature=True)
    (options.out / "other.sif").write_bytes(b"x")
    with pytest.raises(ImageError, match=r"is not in .*dni\.lock"):
        check.verify_image(options.out / "other.sif")
    with pytest.raises(DataError, match="does not exist"):
        check.verify_image(options.out / "gone.sif")


def test_an_image_that_fails_leaves_the_others_in_the_lock(
    image: ImageSpec, options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one fails when the second has been built."""
    lock = built([module("tail")], image, options)
    modules, tail_is_built = [module("head"), module("tail", "b")], threading.Event()
    planned = plan.plan_build(modules, image, options)

    def make(tool: Apptainer, entry: plan.ModulePlan, *_: object) -> LockedImage:
        if entry.module.name == "head":
            assert tail_is_built.wait(60)
            raise BuildError("no room")
        tail_is_built.set()
        return lock.modules["tail"].model_copy(update={"sha256": "2"})

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(build, "build_base", lambda *_, **__: (planned.base, lock.base))
    monkeypatch.setattr(build, "_make", make)
    with pytest.raises(BuildError, match="no room"):
        build.build_images(
            modules, image, options, tool=Apptainer(Path("/none"), "apptainer", (1, 4, 5))
        )
    after = read_lock(options.out)
    assert after is not None
    assert {name: one.sha256 for name, one in after.modules.items()} == {"tail": "2"}


def test_a_lock_without_images_verifies_nothing(image: ImageSpec, options: BuildOptions) -> None:
    built([], image, options)
    with pytest.raises(ImageError, match="names no image"):
        check.locked_images(options.out)


def test_images_without_a_lock_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dni\.lock does not exist"):
        check.locked_images(tmp_path)
    (tmp_path / "head.sif").write_bytes(b"x")
    with pytest.raises(DataError, match=r"no dni\.lock beside"):
        check.verify_image(tmp_path / "head.sif")


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/me")
    assert base.cache_folder() == Path("/scratch/me/dnictl")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert base.cache_folder() == Path.home() / ".cache/dnictl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert base.cache_folder() == Path.home() / ".cache/dnictl"
