"""Importing what a spec names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.data.imports import import_target
from dni_runtime.errors import SpecError
from dni_runtime.spec.choices import find_attribute

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
