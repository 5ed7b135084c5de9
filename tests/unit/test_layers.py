"""Imports go downward only (docs/architecture.md), and pyproject.toml lists every package."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [
    {"errors"},
    {"wire", "spec", "rundir", "lines"},
    {"cuts", "keys"},
    {"link", "core", "data"},
    {"worker"},
    {"image"},
    {"launch"},
    {"bench"},
    {"dnictl"},
]
"""Lowest first; modules of one level do not import each other."""
FOREIGN = {
    "wire": {"torch", "zmq", "click"},
    "spec": {"torch", "zmq", "click"},
    "core": {"zmq", "subprocess", "click"},
    "data": {"zmq", "subprocess", "click"},
    "link": {"subprocess", "click"},
}
"""What a layer must never import."""


def imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            if node.module == "dni_runtime":
                names |= {f"dni_runtime.{alias.name}" for alias in node.names}
    return names


def sources() -> list[tuple[str, Path]]:
    found = [("dnictl", file) for file in (ROOT / "cli").rglob("*.py")]
    for file in (ROOT / "runtime").rglob("*.py"):
        layer = file.relative_to(ROOT / "runtime").parts[0].removesuffix(".py")
        if layer != "__init__":
            found.append((layer, file))
    return found


def level(layer: str) -> int:
    return next(number for number, names in enumerate(LEVELS) if layer in names)


@pytest.mark.parametrize(
    ("layer", "file"), [pytest.param(n, f, id=str(f.relative_to(ROOT))) for n, f in sources()]
)
def test_imports_go_downward(layer: str, file: Path) -> None:
    for name in imports(file):
        top, _, rest = name.partition(".")
        assert name not in FOREIGN.get(layer, ()), f"{layer} imports {name}"
        assert top not in FOREIGN.get(layer, ()), f"{layer} imports {name}"
        if top == "dnictl":
            assert layer == "dnictl"
        elif top == "dni_runtime" and rest:
            other = rest.split(".")[0]
            if other not in (layer, "definitions", "__version__", "load"):
                assert level(other) < level(layer), f"{layer} imports {name}"


def test_every_package_is_listed() -> None:
    """A package that is not listed is missing from the wheel, though an editable install has it."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for package, folder in setuptools["package-dir"].items():
        for file in (ROOT / folder).rglob("__init__.py"):
            inside = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inside)))
    assert found == set(setuptools["packages"])
