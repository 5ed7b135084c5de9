"""Imports go downward only (docs/architecture.md), and pyproject.toml lists every package."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [
    {"errors"},
    {"files", "garbage"},
    {"wire", "spec"},
    {"run", "packing"},
    {"network"},
    {"link", "core", "data"},
    {"worker"},
    {"serving", "resolve"},
    {"split"},
    {"image"},
    {"plan"},
    {"schedulers"},
    {"supervise"},
    {"measure"},
    {"release"},
    {"api"},
    {"dnictl"},
]
"""Lowest first; modules of one level do not import each other."""
FOREIGN = {
    "wire": {"torch", "zmq", "click"},
    "spec": {"torch", "zmq", "click"},
    "network": {"zmq", "subprocess", "click"},
    "core": {"zmq", "subprocess", "click"},
    "data": {"zmq", "subprocess", "click"},
    "link": {"subprocess", "click"},
    "serving": {"subprocess", "click"},
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


def module_of(layer: str, file: Path) -> str:
    package, folder = ("dnictl", "cli") if layer == "dnictl" else ("dni_runtime", "runtime")
    parts = file.relative_to(ROOT / folder).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


def test_no_two_files_need_each_other() -> None:
    """Directly or through others, within a package, in functions and for typing, too."""
    files = {module_of(layer, file): file for layer, file in sources()}
    left = {
        name: imports(file) & files.keys()
        for name, file in files.items()
        if file.name != "__init__.py"  # it collects what its package offers
    }
    while ends := [name for name, own in left.items() if not own & left.keys()]:
        for name in ends:
            del left[name]
    assert not left, f"a circle among {', '.join(sorted(left))}"
