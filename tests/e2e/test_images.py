"""Real images: built, looked at, run, signed, altered.

The base image comes from the user's cache; only its first use is slow. Images are large (a torch
each), so they lie in a folder of this module's own that is removed at the end.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from dni_runtime.errors import ImageError
from dni_runtime.image import apptainer, sif
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.image.check import inspect_image
from dni_runtime.image.layers import pack_layer
from dni_runtime.image.lock import read_lock
from dni_runtime.plan.host import check_images
from dni_runtime.plan.prepare import prepare
from tests.e2e.conftest import Dnictl, need, run

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(900)]

TORCH = f"torch=={version('torch').split('+')[0]}"
NAMES = ["head", "body", "tail"]


def chain(names: list[str] = NAMES, **image: object) -> dict[str, object]:
    """A chain with a module of each name."""
    modules = [
        {"name": name, "layers": [{"Linear": {"in_features": 64, "out_features": 64}}, "ReLU"]}
        for name in names[:-1]
    ]
    tail = {"name": names[-1], "layers": [{"Linear": {"in_features": 64, "out_features": 10}}]}
    return {
        "name": "three",
        "data": {"dataset": "digits", "flatten": True},
        "modules": [*modules, tail],
        "image": {"torch": TORCH, **image},
    }


def write(folder: Path, document: dict[str, object]) -> None:
    (folder / "chain.yaml").write_text(yaml.safe_dump(document))


@pytest.fixture(scope="module")
def workplace(tool: Apptainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for images."""
    folder = tmp_path_factory.mktemp("images")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def dnictl(workplace: Path, tool: Apptainer) -> Dnictl:
    """dnictl in that folder, with a key ring of its own."""
    keys = {"APPTAINER_KEYSDIR": str(workplace / "keys")}
    argv = ["key", "newpair", "--name", "Tester", "--email", "t@example.org", "--comment", ""]
    done = run([tool.path, *argv, "--password", "", "--push=false"], environ={**os.environ, **keys})
    assert done.returncode == 0, done.stderr
    return Dnictl(workplace, keys)


@pytest.fixture(scope="module")
def images(dnictl: Dnictl) -> Path:
    """Signed module images."""
    write(dnictl.folder, chain())
    assert dnictl.json("build", "--sign")["built"] == NAMES
    lock = read_lock(dnictl.folder / "images")
    assert lock is not None
    # What makes this quick: no image is built from its definition.
    assert {one.method for one in lock.modules.values()} == {"layer"}
    return dnictl.folder / "images"


def test_nothing_is_built_twice(images: Path, dnictl: Dnictl) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in images.glob("*.sif")}
    assert len(before) == len(NAMES)
    assert dnictl.json("build")["built"] == []
    assert {p.name: p.stat().st_mtime_ns for p in images.glob("*.sif")} == before
    assert dnictl.run("build", "--dry-run").stdout.count("is up to date") == len(NAMES)


def test_one_changed_layer_rebuilds_one_image(images: Path, dnictl: Dnictl) -> None:
    document = chain()
    document["modules"][1]["layers"][1] = "Tanh"  # type: ignore[index]
    write(dnictl.folder, document)
    plan = dnictl.json("build", "--dry-run")
    assert [m["module"] for m in plan["modules"] if m["build"]] == ["body"]
    assert dnictl.json("build", "--sign")["built"] == ["body"]
    dnictl.run("verify", "--signed")


def test_images_run_by_hand(images: Path, tool: Apptainer) -> None:
    image = images / "head.sif"
    helped = run([tool.path, "run", image, "--help"])
    assert helped.returncode == 0, helped.stderr
    assert "--run" in helped.stdout
    about = run([tool.path, "run-help", image])
    assert "Module 'head' of the DNI chain 'three'" in about.stdout
    tested = run([tool.path, "test", image])
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_inspect_names_the_module(images: Path, dnictl: Dnictl) -> None:
    seen = dnictl.json("inspect", images / "body.sif")
    assert seen["labels"]["module"] == seen["module"]["module"] == "body"
    assert seen["labels"]["chain"] == "three"
    assert seen["labels"]["torch"].startswith(TORCH.removeprefix("torch=="))
    locked = dnictl.json("build", "--dry-run")
    assert {m["module"] for m in locked["modules"]} == set(NAMES)
    assert "module-hash" in dnictl.run("inspect", images / "body.sif").stdout


def test_containers_are_clean(images: Path, tool: Apptainer, tmp_path: Path) -> None:
    odd = tmp_path / 'a,b:c "d"'
    odd.mkdir()
    (odd / "file").write_text("here")
    code = (
        "import os, sys; print(os.getcwd()); print(open('/dni/data/file').read());"
        "print(sys.path); print(os.access('/dni/data', os.W_OK)); print(os.environ['KEPT']);"
        f"print(os.path.exists({str(Path.home() / '.bashrc')!r}))"
    )
    argv = apptainer.run_argv(
        tool, images / "head.sif", ["python3", "-c", code], mounts=[Mount(str(odd), "/dni/data")]
    )
    argv[argv.index("run")] = "exec"
    dirty = {"PYTHONPATH": "/host/site", "KEPT": "$(exit 1) `id`", "PYTHONHOME": "/host"}
    environ = apptainer.host_environment({**os.environ, **dirty})
    assert "PYTHONHOME" not in environ
    done = run(argv, environ=environ)
    cwd, content, path, writable, kept, home = done.stdout.splitlines()
    assert (cwd, content, writable, home) == ("/", "here", "False", "False"), done.stderr
    assert kept == dirty["KEPT"]
    assert "/opt/dni/runtime" in path
    assert "/host/site" not in path


def test_signature_and_hash_are_verified(images: Path, dnictl: Dnictl) -> None:
    found = dnictl.json("verify", "--signed")
    assert len(found) == len(NAMES)
    assert all(entry["valid"] and entry["signed"] for entry in found)
    stranger = Dnictl(dnictl.folder, {"APPTAINER_KEYSDIR": str(dnictl.folder / "no-keys")})
    done = stranger.run("verify", images / "head.sif", expect=65)
    assert "signature" in done.stderr


def test_up_starts_only_signed_images_where_that_is_required(images: Path, dnictl: Dnictl) -> None:
    stranger = Dnictl(dnictl.folder, {"APPTAINER_KEYSDIR": str(dnictl.folder / "no-keys")})
    start = ["up", "--backend", "apptainer", "--dry-run"]
    document = yaml.safe_load((dnictl.folder / "chain.yaml").read_text())
    stranger.run(*start)
    try:
        image = {**document["image"], "require_signed": True}
        write(dnictl.folder, {**document, "image": image})
        dnictl.run(*start)
        assert "signature" in stranger.run(*start, expect=65).stderr
    finally:
        write(dnictl.folder, document)


def test_nothing_of_an_image_is_run_before_it_is_trusted(
    images: Path,
    dnictl: Dnictl,
    tool: Apptainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer whose programs leave a mark, on an image without signature, labels and lock."""
    mark = tmp_path / "was run"
    copy = tmp_path / "images"
    for name in ("bin/cat", "bin/sh"):
        path = tmp_path / "layer" / "usr" / name  # where /bin leads to
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n/bin/touch '{mark}'\n")
        path.chmod(0o755)
    pack_layer(tmp_path / "layer", tmp_path / "layer.sqfs")
    copy.mkdir()
    image = copy / "tail.sif"
    sif.copy_image(images / "tail.sif", image)
    sif.append_layer(tool, image, tmp_path / "layer.sqfs")
    labels = next(o.id for o in sif.objects(tool, image) if o.type == "JSON.Generic")
    apptainer.capture(apptainer.sif_argv(tool, "del", str(labels), str(image)), what="deleting")
    run([tool.path, "exec", image, "cat"])
    assert mark.exists()  # so it would be seen
    mark.unlink()
    monkeypatch.setenv("APPTAINER_KEYSDIR", dnictl.environ["APPTAINER_KEYSDIR"])
    assert inspect_image(tool, image).module["module"] == "tail"
    write(tmp_path, chain(["tail"]))
    workers = prepare(tmp_path / "chain.yaml").workers
    with pytest.raises(ImageError, match="another spec"):
        check_images(tool, workers, copy, {})
    with pytest.raises(ImageError, match=r"dni\.lock"):
        check_images(tool, workers, copy, {}, require_signed=True)
    shutil.copy(images / "dni.lock", copy)
    with pytest.raises(ImageError, match="signature"):
        check_images(tool, workers, copy, {}, require_signed=True)
    assert not mark.exists()
    shutil.rmtree(copy)


def test_tampered_image_is_refused(images: Path, dnictl: Dnictl, tmp_path: Path) -> None:
    copy = tmp_path / "images"
    copy.mkdir()
    shutil.copy(images / "tail.sif", copy)
    shutil.copy(images / "dni.lock", copy)
    dnictl.run("verify", copy / "tail.sif")
    with (copy / "tail.sif").open("r+b") as file:
        file.seek(100_000_000)
        byte = file.read(1)
        file.seek(100_000_000)
        file.write(bytes([byte[0] ^ 1]))
    done = dnictl.run("verify", copy / "tail.sif", expect=65)
    assert "not the image that was built" in done.stderr
    # Whoever can alter the image may alter the lock as well; not so the signature.
    lock = (copy / "dni.lock").read_text()
    old = next(
        line.split('"')[3] for line in lock.split('"tail":')[1].splitlines() if '"sha256"' in line
    )
    new = run(["sha256sum", copy / "tail.sif"]).stdout.split()[0]
    assert old != new
    (copy / "dni.lock").write_text(lock.replace(old, new))
    done = dnictl.run("verify", copy / "tail.sif", expect=65)
    assert "signature" in done.stderr
    shutil.rmtree(copy)


def signed_by_pem(folder: Path, *options: str) -> Dnictl:
    """Build an image that is signed by a PEM key, and verify it."""
    openssl = need("openssl")
    folder.mkdir()
    private, public = folder / "private.pem", folder / "public.pem"
    run([openssl, "genpkey", "-algorithm", "ed25519", "-out", private])
    run([openssl, "pkey", "-in", private, "-pubout", "-out", public])
    write(folder, chain(["only"]))
    mine = Dnictl(folder)
    assert mine.json("build", *options, "--key", private)["built"] == ["only"]
    mine.run("verify", "--key", public)
    assert "public key" in mine.run("verify", expect=65).stderr
    return mine


def test_pem_key(workplace: Path) -> None:
    signed_by_pem(workplace / "pem")
