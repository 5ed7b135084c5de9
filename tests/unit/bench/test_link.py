"""Sizes of batches, as they are written."""

from __future__ import annotations

import pytest

from dni_runtime.bench.link import parse_size
from dni_runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KB", 65536), ("1 mb", 1 << 20), ("4096", 4096), ("0.5KB", 512), ("16B", 16)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "KB", "1TB", "-1KB", "6", "0", "nan", "infGB", "2GB", "1.5"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="not a valid batch size"):
        parse_size(text)
