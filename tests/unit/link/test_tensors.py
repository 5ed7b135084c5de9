"""Tensors to bytes and back."""

from __future__ import annotations

import warnings

import pytest
import torch

from dni_runtime.errors import WireError
from dni_runtime.link.tensors import DTYPES, from_buffer, to_buffer
from dni_runtime.wire import TensorContract, TensorEntry


def example(dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([[0.0, 1.5, 2.0], [3.0, 0.0, 5.0]])
    return values.to(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(name: str) -> None:
    x_BD = example(DTYPES[name])
    entry, buffer = to_buffer(x_BD, TensorContract("h", name, (3,), 4))
    assert entry == TensorEntry("h", name, (2, 3))
    assert buffer.nbytes == x_BD.nbytes
    back = from_buffer(entry, memoryview(bytearray(buffer)), name)
    assert back.dtype is x_BD.dtype
    assert torch.equal(back, x_BD)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
def test_nothing_is_copied(name: str) -> None:
    x_BD = example(DTYPES[name])
    entry, buffer = to_buffer(x_BD, TensorContract("h", name, (3,), 4))
    back = from_buffer(entry, buffer, name)
    assert back.data_ptr() == x_BD.data_ptr()


def test_a_view_keeps_the_memory_alive() -> None:
    entry, buffer = to_buffer(
        torch.full((1000, 3), 7.0), TensorContract("h", "float32", (3,), 1000)
    )
    filler = [torch.zeros(1000, 3) for _ in range(100)]
    assert from_buffer(entry, buffer, "float32").eq(7).all()
    assert len(filler) == 100


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_narrowed_for_the_wire_and_widened_again(narrow: str) -> None:
    x_BD = example(torch.float32)
    entry, buffer = to_buffer(x_BD, TensorContract("h", narrow, (3,), 4))
    assert (entry.dtype, buffer.nbytes) == (narrow, x_BD.nbytes // 2)
    back = from_buffer(entry, buffer, "float32")
    assert back.dtype is torch.float32
    assert torch.equal(back, x_BD)


def test_a_view_with_strides_is_laid_out() -> None:
    x_BD = torch.arange(6.0).reshape(3, 2).T
    entry, buffer = to_buffer(x_BD, TensorContract("h", "float32", (3,), 4))
    assert torch.equal(from_buffer(entry, buffer, "float32"), x_BD)


def test_a_tensor_that_requires_grad_is_detached() -> None:
    x_BD = example(torch.float32).requires_grad_()
    entry, buffer = to_buffer(x_BD, TensorContract("h", "float32", (3,), 4))
    assert not from_buffer(entry, buffer, "float32").requires_grad


@pytest.mark.parametrize("offset", range(8))
def test_a_misaligned_buffer_is_copied(offset: int) -> None:
    x_B = torch.arange(5)
    raw = bytearray(48)
    raw[offset : offset + 40] = to_buffer(x_B, TensorContract("y", "int64", (), 8))[1]
    back = from_buffer(
        TensorEntry("y", "int64", (5,)), memoryview(raw)[offset : offset + 40], "int64"
    )
    assert back.data_ptr() % 8 == 0
    assert torch.equal(back, x_B)


def test_any_byte_makes_a_defined_bool() -> None:
    back = from_buffer(
        TensorEntry("y", "bool", (3,)), memoryview(bytearray(b"\x00\x01\xfe")), "bool"
    )
    assert back.tolist() == [False, True, True]
    assert back.view(torch.uint8).tolist() == [0, 1, 1]


def test_a_tensor_without_elements() -> None:
    entry, buffer = to_buffer(torch.zeros(2, 0), TensorContract("h", "float32", (0,), 4))
    assert from_buffer(entry, buffer, "float32").shape == (2, 0)


@pytest.mark.parametrize("shape", [(2, 4), (5, 3), (0, 3), (3,)])
def test_a_tensor_that_breaks_the_contract_is_not_sent(shape: tuple[int, ...]) -> None:
    with pytest.raises(WireError, match=r"h: float32\[B x 3\]"):
        to_buffer(torch.zeros(shape), TensorContract("h", "float32", (3,), 4))


def test_no_warning_about_memory_that_cannot_be_written() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry, buffer = to_buffer(example(torch.float32), TensorContract("h", "float32", (3,), 4))
        from_buffer(entry, buffer, "float32").add_(1)
