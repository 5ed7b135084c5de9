"""``compare`` and ``bench``: what their tables say."""

from __future__ import annotations

import pytest

from dni_runtime.measure.compare import Row
from dnictl.measure import _print, _size


def test_what_was_not_asked_was_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """A metric that falls has no target unless one is named."""
    row = Row("mixed", 0.3, 0.3, 0.3, 10.0, reached=0, trials=1, target_s=None)
    _print([row], "loss", None)
    assert "reached" not in capsys.readouterr().out
    _print([row], "loss", 0.2)
    assert "reached by 0 of 1" in capsys.readouterr().out


def test_sizes_have_decimal_units_as_elsewhere() -> None:
    assert [_size(nbytes) for nbytes in (0, 640, 8192, 2_000_000)] == [
        "-", "640 B", "8.19 KB", "2 MB",
    ]  # fmt: skip
