"""The image commands, as far as they need no container program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dni_runtime.errors import DniError, ImageError, SpecError
from dnictl import images


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chain of two modules that starts from a local image."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "start.sif").write_bytes(b"start")
    path = tmp_path / "chain.yaml"
    document = {
        "name": "two",
        "data": {"dataset": "digits", "flatten": True},
        "modules": [
            {"name": "head", "layers": [{"Linear": {"in_features": 64, "out_features": 8}}]},
            {"name": "tail", "layers": [{"Linear": {"in_features": 8, "out_features": 10}}]},
        ],
        "image": {"base": {"bootstrap": "localimage", "source": "start.sif"}},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def edit(chain: Path, **image: object) -> None:
    document = yaml.safe_load(chain.read_text())
    document["image"].update(image)
    chain.write_text(yaml.safe_dump(document))


def call(command: str, *arguments: str | Path) -> Result:
    result = CliRunner().invoke(getattr(images, command), [str(a) for a in arguments])
    if isinstance(result.exception, DniError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_dry_run_builds_nothing(chain: Path, tmp_path: Path) -> None:
    result = call("build", chain, "--out", tmp_path / "images", "--dry-run")
    assert "base image: would be built" in result.stdout
    assert "head.sif: would be built (not built yet)" in result.stdout
    document = json.loads(
        call("build", chain, "--out", tmp_path / "images", "--dry-run", "--json").stdout
    )
    assert [m["module"] for m in document["modules"]] == ["head", "tail"]
    assert document["base"] == {"image": None, "ready": False}
    assert not (tmp_path / "images").exists()
    assert not (tmp_path / "cache").exists()


def test_errors_name_the_line_of_the_chain_file(chain: Path) -> None:
    edit(chain, packages=["gcc", "no good"])
    with pytest.raises(SpecError, match=r"chain\.yaml:\d+: image\.packages\[1\]"):
        call("build", chain, "--dry-run")


def _locked(folder: Path, sha256: str, size: int) -> None:
    entry = {
        "image": "head.sif",
        "sha256": sha256,
        "size_bytes": size,
        "content": "c",
        "module_hash": "m",
        "sources": {},
        "method": "layer",
    }
    base = {"content": "c", "sha256": "s", "definition_sha256": "d", "torch": "2", "wheels": []}
    lock = {
        "chain": "two",
        "builder": "b",
        "runtime_version": "0",
        "base": base,
        "modules": {"head": entry},
    }
    (folder / "dni.lock").write_text(json.dumps(lock))


EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_verify_reports_each_image(tmp_path: Path) -> None:
    (tmp_path / "head.sif").write_bytes(b"")
    _locked(tmp_path, EMPTY, 0)
    assert "head.sif: ok" in call("verify", "--out", tmp_path).stdout
    assert "not signed" in call("verify", tmp_path / "head.sif").stdout
    (document,) = json.loads(call("verify", "--out", tmp_path, "--json").stdout)
    assert document["valid"]
    assert not document["signed"]
    (tmp_path / "head.sif").write_bytes(b"x")
    with pytest.raises(ImageError, match="not the image that was built"):
        call("verify", "--out", tmp_path)


def test_unsigned_images_are_refused_when_told_so(tmp_path: Path) -> None:
    (tmp_path / "head.sif").write_bytes(b"")
    _locked(tmp_path, EMPTY, 0)
    with pytest.raises(ImageError, match="not signed"):
        call("verify", "--out", tmp_path, "--signed")
