"""Tensors to bytes and back."""

from __future__ import annotations

import math
import warnings

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dni_runtime.errors import WireError
from dni_runtime.link.tensors import DTYPES, dequantize, from_buffers, quantize, to_buffers
from dni_runtime.wire import TensorContract, TensorEntry

TENSOR = TensorContract("h", "int8", (3,), 4, scale=())
CHANNEL = TensorContract("h", "int8", (3,), 4, scale=(3,))


def example(dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([[0.0, 1.5, 2.0], [3.0, 0.0, 5.0]])
    return values.to(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(name: str) -> None:
    x_BD = example(DTYPES[name])
    (entry,), (buffer,) = to_buffers(x_BD, TensorContract("h", name, (3,), 4))
    assert entry == TensorEntry("h", name, (2, 3))
    assert buffer.nbytes == x_BD.nbytes
    back = from_buffers((entry,), (memoryview(bytearray(buffer)),), name)
    assert back.dtype is x_BD.dtype
    assert torch.equal(back, x_BD)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
def test_nothing_is_copied(name: str) -> None:
    x_BD = example(DTYPES[name])
    (entry,), (buffer,) = to_buffers(x_BD, TensorContract("h", name, (3,), 4))
    back = from_buffers((entry,), (buffer,), name)
    assert back.data_ptr() == x_BD.data_ptr()


def test_a_view_keeps_the_memory_alive() -> None:
    (entry,), (buffer,) = to_buffers(
        torch.full((1000, 3), 7.0), TensorContract("h", "float32", (3,), 1000)
    )
    filler = [torch.zeros(1000, 3) for _ in range(100)]
    assert from_buffers((entry,), (buffer,), "float32").eq(7).all()
    assert len(filler) == 100


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_narrowed_for_the_wire_and_widened_again(narrow: str) -> None:
    x_BD = example(torch.float32)
    (entry,), (buffer,) = to_buffers(x_BD, TensorContract("h", narrow, (3,), 4))
    assert (entry.dtype, buffer.nbytes) == (narrow, x_BD.nbytes // 2)
    back = from_buffers((entry,), (buffer,), "float32")
    assert back.dtype is torch.float32
    assert torch.equal(back, x_BD)


def test_a_view_with_strides_is_laid_out() -> None:
    x_BD = torch.arange(6.0).reshape(3, 2).T
    (entry,), (buffer,) = to_buffers(x_BD, TensorContract("h", "float32", (3,), 4))
    assert torch.equal(from_buffers((entry,), (buffer,), "float32"), x_BD)


def test_a_tensor_that_requires_grad_is_detached() -> None:
    x_BD = example(torch.float32).requires_grad_()
    (entry,), (buffer,) = to_buffers(x_BD, TensorContract("h", "float32", (3,), 4))
    assert not from_buffers((entry,), (buffer,), "float32").requires_grad


@pytest.mark.parametrize("offset", range(8))
def test_a_misaligned_buffer_is_copied(offset: int) -> None:
    x_B = torch.arange(5)
    raw = bytearray(48)
    raw[offset : offset + 40] = to_buffers(x_B, TensorContract("y", "int64", (), 8))[1][0]
    back = from_buffers(
        [TensorEntry("y", "int64", (5,))], [memoryview(raw)[offset : offset + 40]], "int64"
    )
    assert back.data_ptr() % 8 == 0
    assert torch.equal(back, x_B)


def test_any_byte_makes_a_defined_bool() -> None:
    back = from_buffers(
        [TensorEntry("y", "bool", (3,))], [memoryview(bytearray(b"\x00\x01\xfe"))], "bool"
    )
    assert back.tolist() == [False, True, True]
    assert back.view(torch.uint8).tolist() == [0, 1, 1]


def test_a_tensor_without_elements() -> None:
    (entry,), (buffer,) = to_buffers(torch.zeros(2, 0), TensorContract("h", "float32", (0,), 4))
    assert from_buffers((entry,), (buffer,), "float32").shape == (2, 0)


@pytest.mark.parametrize("contract", [TensorContract("h", "float32", (3,), 4), CHANNEL])
@pytest.mark.parametrize("shape", [(2, 4), (5, 3), (0, 3), (3,), ()])
def test_a_tensor_that_breaks_the_contract_is_not_sent(
    shape: tuple[int, ...], contract: TensorContract
) -> None:
    with pytest.raises(WireError, match=rf"h: {contract.dtype}\[B x 3\]"):
        to_buffers(torch.zeros(shape), contract)


def test_no_warning_about_memory_that_cannot_be_written() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (entry,), (buffer,) = to_buffers(
            example(torch.float32), TensorContract("h", "float32", (3,), 4)
        )
        from_buffers((entry,), (buffer,), "float32").add_(1)


def through_int8(x_BX: torch.Tensor, contract: TensorContract) -> torch.Tensor:
    """What the other end gets."""
    entries, buffers = to_buffers(x_BX, contract)
    assert [entry.dtype for entry in entries] == ["int8", "float32"]
    assert entries[1].shape == contract.scale
    copies = [memoryview(bytearray(buffer)) for buffer in buffers]
    return from_buffers(entries, copies, str(x_BX.dtype).removeprefix("torch."))


def test_one_scale_for_the_tensor() -> None:
    x_BX = torch.tensor([[0.0, 1.0, -127.0], [0.4, 0.6, 64.2]])
    assert through_int8(x_BX, TENSOR).tolist() == [[0, 1, -127], [0, 1, 64]]


def test_one_scale_per_channel() -> None:
    x_BX = torch.tensor([[0.0, 1.0, -1270.0], [0.25, 127.0, 1.0]])
    back = through_int8(x_BX, CHANNEL)
    assert back[:, 0].tolist() == pytest.approx([0, 0.25])
    assert back[:, 1].tolist() == [1, 127]
    assert back[:, 2].tolist() == [-1270, 0]


def test_ties_go_to_the_even_neighbour() -> None:
    q_BX, scale = quantize(torch.tensor([[127.0, 0.5, 1.5, -2.5]]), ())
    assert (q_BX.tolist(), scale.item()) == ([[127, 0, 2, -2]], 1)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((5, 4), (4,)), ((5, 4, 3, 2), (4, 1, 1)), ((5, 6, 4), (1, 4)), ((5, 1, 3, 2), (1, 1, 1))],
)
def test_each_channel_is_quantized_as_if_alone(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x_BX = torch.randn(shape) * torch.logspace(-3, 3, math.prod(sizes)).reshape(sizes)
    back = dequantize(*quantize(x_BX, sizes))
    channel = 1 + max(sizes.index(max(sizes)), 0)
    for alone, given_ in zip(back.unbind(channel), x_BX.unbind(channel), strict=True):
        assert torch.equal(alone, dequantize(*quantize(given_, ())))


@hypothesis.example([0.0, 0.0, 0.0, 0.0, 0.0, 1.0067824998726654e-36], TENSOR)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=6, max_size=6),
    st.sampled_from([TENSOR, CHANNEL]),
)
def test_nothing_is_off_by_more_than_half_a_step(
    values: list[float], contract: TensorContract
) -> None:
    x_BX = torch.tensor(values).reshape(2, 3)
    back = through_int8(x_BX, contract).double()
    largest = x_BX.abs().amax(0) if contract is CHANNEL else x_BX.abs().amax()
    step = largest.double() / 127
    assert ((back - x_BX.double()).abs() <= step * 0.50001 + 2 * 2.0**-126).all()


@pytest.mark.parametrize("contract", [TENSOR, CHANNEL])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40])
def test_zeros_and_what_is_too_small(contract: TensorContract, value: float) -> None:
    back = through_int8(torch.full((2, 3), value), contract)
    assert back.isfinite().all()
    assert (back - value).abs().max() <= 1e-39


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_as_nan_with_all_that_shares_its_scale(value: float) -> None:
    x_BX = torch.tensor([[127.0, 2.0, 3.0], [4.0, value, 6.0]])
    assert through_int8(x_BX, TENSOR).isnan().all()
    back = through_int8(x_BX, CHANNEL)
    assert back.isnan().tolist() == [[False, True, False]] * 2
    assert back[:, 0].tolist() == [127, 4]


def test_other_floating_types_are_quantized_too() -> None:
    x_BX = torch.tensor([[127.0, 1.0, -4.0]], dtype=torch.float64)
    assert torch.equal(through_int8(x_BX, TENSOR), x_BX)
    assert through_int8(x_BX.bfloat16(), CHANNEL).dtype is torch.bfloat16


def test_the_senders_own_activation_stays_exact() -> None:
    x_BX = torch.tensor([[100.0, 0.3, 0.2]], requires_grad=True)
    before = x_BX.detach().clone()
    through_int8(x_BX, TENSOR)
    assert torch.equal(x_BX, before)


def test_a_view_with_strides_is_quantized_as_it_is_read() -> None:
    x_BX = torch.tensor([[127.0, 1.0], [2.0, 3.0], [4.0, 5.0]]).T
    assert torch.equal(through_int8(x_BX, TENSOR), x_BX)


@pytest.mark.parametrize("scale", [(), (0,)])
def test_an_empty_tensor_is_quantized(scale: tuple[int, ...]) -> None:
    contract = TensorContract("h", "int8", (0,), 4, scale)
    assert through_int8(torch.zeros(2, 0), contract).shape == (2, 0)
