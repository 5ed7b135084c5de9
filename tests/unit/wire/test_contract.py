"""Contracts of single tensors."""

from __future__ import annotations

import math
import struct
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dni_runtime.errors import WireError
from dni_runtime.wire import TensorContract, TensorEntry

H = TensorContract("h", "bfloat16", (3, 4), batch_limit=8)


def test_sizes() -> None:
    assert (H.sample_bytes, H.buffer_bytes) == (24, 192)
    assert TensorContract("y", "int64", (), 8).sample_bytes == 8


@pytest.mark.parametrize("samples", [1, 8])
def test_gives_the_number_of_samples(samples: int) -> None:
    assert (
        H.check([TensorEntry("h", "bfloat16", (samples, 3, 4))], [bytes(24 * samples)]) == samples
    )


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
        H.check([entry], [bytes(nbytes)])
    assert caught.value.reason == reason


LONG = TensorContract("h", "float32", (8, 4), batch_limit=8, varying=(0,))


@pytest.mark.parametrize("length", [1, 5, 8])
def test_a_batch_may_have_a_length_of_its_own(length: int) -> None:
    row = TensorEntry("h", "float32", (2, length, 4))
    assert LONG.check([row], [bytes(2 * length * 16)]) == 2
    for size, reason in ((2 * length * 16 - 1, "truncated"), (2 * length * 16 + 1, "oversized")):
        with pytest.raises(WireError) as caught:
            LONG.check([row], [bytes(size)])
        assert caught.value.reason == reason


@pytest.mark.parametrize("sizes", [(9, 4), (0, 4), (8, 3), (8, 5), (4, 8), (5,), (5, 4, 1)])
def test_no_longer_than_the_contract(sizes: tuple[int, ...]) -> None:
    with pytest.raises(WireError, match=r"h: float32\[B x <=8 x 4\], .* comes with sizes"):
        LONG.check([TensorEntry("h", "float32", (2, *sizes))], [bytes(8 * math.prod(sizes))])


def test_the_error_names_the_contract() -> None:
    with pytest.raises(WireError, match=r"h: bfloat16\[B x 3 x 4\], B from 1 to 8"):
        H.check([TensorEntry("h", "bfloat16", (2, 4, 3))], [bytes(48)])


Q = TensorContract("h", "int8", (3, 4), batch_limit=8, scale=(3, 1))
Q_ROW = TensorEntry("h", "int8", (2, 3, 4))
SCALES = TensorEntry("h_scale", "float32", (3, 1))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_sizes_of_a_quantized_tensor() -> None:
    assert (Q.names, Q.sample_bytes, Q.buffer_bytes) == (("h", "h_scale"), 12, 96)
    assert TensorContract("h", "int8", (9,), 2, scale=(9,)).buffer_bytes == 36


@pytest.mark.parametrize(
    "scales", [(0.0, 1.0, 3e38), (-0.0, 1e-45, 1.0), (math.nan, -math.nan, 1.0)]
)
def test_scales_are_finite_or_nan(scales: tuple[float, ...]) -> None:
    assert Q.check([Q_ROW, SCALES], [bytes(24), floats(*scales)]) == 2
    assert Q.check([Q_ROW, SCALES], [bytes(24), memoryview(b"x" + floats(*scales))[1:]]) == 2


@pytest.mark.parametrize(
    ("rows", "buffers", "reason"),
    [
        ([Q_ROW], [bytes(24)], "count"),
        ([SCALES, Q_ROW], [bytes(12), bytes(24)], "count"),
        ([Q_ROW, TensorEntry("g_scale", "float32", (3, 1))], [bytes(24), bytes(12)], "count"),
        ([Q_ROW, SCALES, SCALES], [bytes(24), bytes(12), bytes(12)], "count"),
        ([TensorEntry("h", "uint8", (2, 3, 4)), SCALES], [bytes(24), bytes(12)], "dtype"),
        ([Q_ROW, TensorEntry("h_scale", "float16", (3, 1))], [bytes(24), bytes(6)], "dtype"),
        ([Q_ROW, TensorEntry("h_scale", "float32", (3,))], [bytes(24), bytes(12)], "shape"),
        ([Q_ROW, TensorEntry("h_scale", "float32", (4, 1))], [bytes(24), bytes(16)], "shape"),
        ([Q_ROW, SCALES], [bytes(24), bytes(11)], "truncated"),
        ([Q_ROW, SCALES], [bytes(24), bytes(13)], "oversized"),
        ([Q_ROW, SCALES], [bytes(23), bytes(12)], "truncated"),
        ([Q_ROW, SCALES], [bytes(24), floats(1, -1e-45, 1)], "scale"),
        ([Q_ROW, SCALES], [bytes(24), floats(1, 1, math.inf)], "scale"),
        ([Q_ROW, SCALES], [bytes(24), floats(-math.inf, 1, math.nan)], "scale"),
    ],
)
def test_scales_are_checked_like_tensors(
    rows: list[TensorEntry], buffers: list[bytes], reason: str
) -> None:
    with pytest.raises(WireError) as caught:
        Q.check(rows, buffers)
    assert caught.value.reason == reason


def test_a_tensor_that_is_not_quantized_comes_without_scales() -> None:
    with pytest.raises(WireError) as caught:
        H.check([TensorEntry("h", "bfloat16", (2, 3, 4)), SCALES], [bytes(48), bytes(12)])
    assert caught.value.reason == "count"


@given(st.binary(min_size=12, max_size=12))
def test_any_bytes_are_scales_or_refused(data: bytes) -> None:
    values = struct.unpack("<3f", data)
    fits = not any(value < 0 or value == math.inf for value in values)
    expected = nullcontext() if fits else pytest.raises(WireError, match="negative or infinite")
    with expected:
        assert Q.check([Q_ROW, SCALES], [bytes(24), data]) == 2
