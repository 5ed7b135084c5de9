"""Several outputs in one row: what goes in comes out, and gradients are tensors of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dni_runtime.errors import SpecError
from dni_runtime.packing import given_back, pack, row_of, taken, unpack
from dni_runtime.spec import EdgeSpec, TensorSpec
from tests.specs import float32, varying

OUTPUTS = (float32(2, 3, 3), float32(4))


def test_what_goes_in_comes_out() -> None:
    """As tensors of their own: kernels may compute parts of a row in another order."""
    given = torch.randn(5, 2, 3, 3), torch.randn(5, 4)
    found = unpack(pack(given), OUTPUTS)
    for one, other in zip(found, given, strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous()


@pytest.mark.parametrize("length", [8, 3, 1])
def test_a_row_tells_the_length_of_its_parts(length: int) -> None:
    outputs = (varying(float32(8, 3)), float32(4), varying(float32(2, 8), 1))
    assert str(row_of(outputs)) == "float32[B x <=44]"
    given = torch.randn(5, length, 3), torch.randn(5, 4), torch.randn(5, 2, length)
    found = unpack(row := pack(given), outputs)
    assert all(torch.equal(one, other) for one, other in zip(found, given, strict=True))
    edge = EdgeSpec(
        source="a", target="b", number=0, tensor=row_of(outputs[:2]), takes=(1, 2), gradients=1
    )
    some, fixed = taken(row, outputs, edge), given[1]
    first, second, third = given_back([(fixed, (1,)), (some, (1, 2)), (row, ())], outputs)
    assert torch.equal(third, row)
    zero = [torch.zeros_like(one) for one in given]
    for back, there in ((first, (1,)), (second, (1, 2))):
        for at, one in enumerate(unpack(back, outputs)):
            assert torch.equal(one, given[at] if at in there else zero[at])


@pytest.mark.parametrize("other", [varying(float32(9)), varying(float32(8, 8), 0, 1)])
def test_a_row_of_different_lengths_is_refused(other: TensorSpec) -> None:
    with pytest.raises(SpecError, match=r"max_length: float32\[B x <=8\] and .*lengths differ"):
        row_of((varying(float32(8)), other))


def test_each_output_gets_its_gradient_as_a_tensor_of_its_own() -> None:
    seen: list[Tensor] = []
    leaves = [torch.randn(5, 2, 3, 3, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
    outputs = [leaf.clone() for leaf in leaves]
    row = pack(outputs)
    for one in outputs:
        one.register_hook(seen.append)
    g = torch.randn(row.shape)
    row.backward(g)
    assert len(seen) == 2
    assert all(one.is_contiguous() for one in seen)
    for leaf, wanted in zip(leaves, unpack(g, OUTPUTS), strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, wanted)
