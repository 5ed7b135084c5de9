"""Contracts of single tensors."""

from __future__ import annotations

import pytest

from dni_runtime.errors import WireError
from dni_runtime.wire import TensorContract, TensorEntry

H = TensorContract("h", "bfloat16", (3, 4), batch_limit=8)


def test_sizes() -> None:
    assert (H.sample_bytes, H.buffer_bytes) == (24, 192)
    assert TensorContract("y", "int64", (), 8).sample_bytes == 8


@pytest.mark.parametrize("samples", [1, 8])
def test_gives_the_number_of_samples(samples: int) -> None:
    assert H.check(TensorEntry("h", "bfloat16", (samples, 3, 4)), 24 * samples) == samples


@pytest.mark.parametrize(
    ("entry", "nbytes", "reason"),
    [
        (TensorEntry("y", "bfloat16", (2, 3, 4)), 48, "count"),
        (TensorEntry("h", "float32", (2, 3, 4)), 96, "dtype"),
        (TensorEntry("h", "float16", (2, 3, 4)), 48, "dtype"),
        (TensorEntry("h", "bfloat16", (2, 4, 3)), 48, "shape"),
        (TensorEntry("h", "bfloat16", (2, 12)), 48, "shape"),
        (TensorEntry("h", "bfloat16", ()), 2, "shape"),
        (TensorEntry("h", "bfloat16", (0, 3, 4)), 0, "shape"),
        (TensorEntry("h", "bfloat16", (9, 3, 4)), 216, "shape"),
        (TensorEntry("h", "bfloat16", (2, 3, 4)), 47, "truncated"),
        (TensorEntry("h", "bfloat16", (2, 3, 4)), 49, "oversized"),
    ],
)
def test_names_what_differs(entry: TensorEntry, nbytes: int, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        H.check(entry, nbytes)
    assert caught.value.reason == reason


def test_the_error_names_the_contract() -> None:
    with pytest.raises(WireError, match=r"h: bfloat16\[B x 3 x 4\], B from 1 to 8"):
        H.check(TensorEntry("h", "bfloat16", (2, 4, 3)), 48)
