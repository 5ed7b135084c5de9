"""Importing what a spec names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.data.imports import import_target
from dni_runtime.errors import SpecError
from dni_runtime.spec.choices import call, find_attribute

LAZY = """\
try:
    import missing_package
except ImportError as error:
    raise ModuleNotFoundError("lazy needs another package") from error
"""


def test_an_import_error_shows_its_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a package that reports a missing requirement by an error of its own."""
    (tmp_path / "lazy_one.py").write_text(LAZY)
    monkeypatch.syspath_prepend(tmp_path)
    wanted = "lazy needs another package, caused by .*No module named 'missing_package'"
    with pytest.raises(SpecError, match=wanted):
        find_attribute("lazy_one:build", "network", ())
    with pytest.raises(SpecError, match=wanted):
        import_target("lazy_one:Data", tmp_path, what="data set", location=())


def test_a_torchvision_of_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_vision.py").write_text(
        "import torch\ntorch.library.register_fake('torchvision::nms')(print)\n"
    )
    with pytest.raises(SpecError, match="install both from the same index"):
        find_attribute("broken_vision:resnet18", "network", ())
    with pytest.raises(SpecError, match="install both from the same index"):
        import_target("broken_vision:ImageFolder", tmp_path, what="data set", location=())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("torch.nn.Liner(3, 3)", "AttributeError: .*Liner"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("{}['width']", "KeyError: 'width'"),
    ],
)
def test_what_fails_in_users_code_is_told(
    line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is imported, and when an object is made."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"fails_{len(line)}"
    (tmp_path / f"{name}.py").write_text(f"import torch\n{line}\n")
    for _ in range(2):  # also if it is tried again
        with pytest.raises(SpecError, match=f"importing '{name}' failed: {told}") as info:
            find_attribute(f"{name}:Block", "layer", ())
    assert str(info.value).count("importing") == 1

    class Fails:
        def __init__(self) -> None:
            exec(f"import torch\n{line}")

    with pytest.raises(SpecError, match=f"Fails refuses {{}}: {told}"):
        call(Fails, {}, name="Fails", location=())


def test_who_imports_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outer_one.py").write_text("import inner_one\n")
    (tmp_path / "inner_one.py").write_text("\nimport not_installed\n")
    wanted = r"'outer_one' imports 'not_installed', which is missing \(.*inner_one.py:2\)"
    with pytest.raises(SpecError, match=wanted):
        find_attribute("outer_one:build", "network", ())
    with pytest.raises(SpecError, match=wanted):
        import_target("outer_one:Data", tmp_path, what="data set", location=())
