"""Module layers: what is in them, and what changes their hash."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.image import layers
from dni_runtime.image.layers import ModuleBuild
from tests.unit.test_layers import LEVELS

RUNTIME: dict[str, Path] = {}
WORKER = {layer for layers in LEVELS[: LEVELS.index({"worker"}) + 1] for layer in layers}


@pytest.fixture
def module(tmp_path: Path) -> ModuleBuild:
    source = tmp_path / "mine.py"
    source.write_text("class Mine: pass\n")
    worker: Any = SimpleNamespace(
        module="head", chain="c", hash="a" * 64, to_json=lambda: '{"module": "head"}\n'
    )
    return ModuleBuild(worker, {"pkg/mine.py": source})


def test_files(module: ModuleBuild, tmp_path: Path) -> None:
    runtime = tmp_path / "frames.py"
    runtime.write_text("x = 1\n")
    files = layers.layer_files(module, {"dni_runtime/wire/frames.py": runtime})
    assert files == {
        "opt/dni/module.json": b'{"module": "head"}\n',
        "opt/dni/src/pkg/mine.py": b"class Mine: pass\n",
        "opt/dni/runtime/dni_runtime/wire/frames.py": b"x = 1\n",
    }
    digest = hashlib.sha256(b"class Mine: pass\n").hexdigest()
    assert layers.source_digests(files) == {"pkg/mine.py": digest}


def test_an_image_holds_what_a_worker_imports_and_no_more() -> None:
    files = {name.removeprefix("dni_runtime/") for name in layers.runtime_files()}
    assert {"__init__.py", "worker/__main__.py", "core/export.py", "data/digits.npz"} <= files
    assert "worker/group.py" in files, "imported on use"
    found = {name.partition("/")[0].removesuffix(".py") for name in files}
    # Not the resolver: a better text of an error in a chain rebuilds no image.
    assert found == {"__init__", "py.typed", "serving"} | WORKER


def test_what_is_imported_on_use_or_for_types(tmp_path: Path) -> None:
    for name, source in {
        "__init__": "def load():\n    from dni_runtime import launch\n",
        "launch": "",
        "worker/__init__": "",
        "worker/__main__": "def go():\n    import zmq\n    from dni_runtime import wire\n",
        "wire/__init__": "if TYPE_CHECKING:\n    from dni_runtime.launch import up\n"
        "from dni_runtime.wire.frames import split as cut\n",
        "wire/frames": "def split(): pass\n",
        "wire/other": "",
        "core/__init__": "",
        "core/export": "",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    (tmp_path / "wire" / "table.npz").touch()
    files = layers.runtime_files(tmp_path)
    assert list(files) == [
        f"dni_runtime/{name}"
        for name in (
            "__init__.py",
            "core/__init__.py",
            "core/export.py",
            "wire/__init__.py",
            "wire/frames.py",
            "wire/table.npz",
            "worker/__init__.py",
            "worker/__main__.py",
        )
    ]


@pytest.mark.parametrize("path", ["../escape.py", "/etc/passwd", "a/../../b.py"])
def test_sources_stay_in_their_folder(module: ModuleBuild, path: str) -> None:
    bad = dataclasses.replace(module, sources={path: next(iter(module.sources.values()))})
    with pytest.raises(SpecError, match="leaves the folder"):
        layers.layer_files(bad, RUNTIME)


def test_unreadable_source_is_named(module: ModuleBuild, tmp_path: Path) -> None:
    bad = dataclasses.replace(module, sources={"gone.py": tmp_path / "gone.py"})
    with pytest.raises(SpecError, match=r"gone\.py cannot be read"):
        layers.layer_files(bad, RUNTIME)


def test_digest_follows_the_content() -> None:
    files = {"opt/dni/module.json": b"1", "a": b"xy", "b": b""}
    digest = layers.layer_digest(files, "hash")
    assert layers.layer_digest(dict(reversed(files.items())), "hash") == digest
    # Host paths in the spec are no reason to build: its hash stands for it.
    assert layers.layer_digest({**files, "opt/dni/module.json": b"2"}, "hash") == digest
    changed = [
        layers.layer_digest(files, "other"),
        layers.layer_digest({**files, "a": b"xz"}, "hash"),
        layers.layer_digest({"opt/dni/module.json": b"1", "a": b"x", "b": b"y"}, "hash"),
        layers.layer_digest({"opt/dni/module.json": b"1", "ax": b"y", "b": b""}, "hash"),
    ]
    assert len({digest, *changed}) == 5


def test_written_layer_is_readable_for_everybody(module: ModuleBuild, tmp_path: Path) -> None:
    for source in module.sources.values():
        source.chmod(0o600)
    root = tmp_path / "layer"
    layers.write_layer(layers.layer_files(module, RUNTIME), root)
    modes = {path.name: path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert modes == {
        "opt": 0o755, "dni": 0o755, "src": 0o755, "pkg": 0o755,
        "mine.py": 0o644, "module.json": 0o644,
    }  # fmt: skip


def test_packing_is_reproducible_by_its_flags() -> None:
    argv = layers.squashfs_argv("/usr/bin/mksquashfs", Path("/l"), Path("/l.sqfs"))
    assert argv[:3] == ["/usr/bin/mksquashfs", "/l", "/l.sqfs"]
    assert {"-noappend", "-all-root", "-no-xattrs", "-mkfs-time", "-all-time"} <= set(argv)
