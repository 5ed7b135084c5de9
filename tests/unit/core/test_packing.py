"""Several outputs in one row: what goes in comes out, and gradients are tensors of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from dni_runtime.packing import pack, unpack
from tests.specs import float32

OUTPUTS = (float32(2, 3, 3), float32(4))


def test_what_goes_in_comes_out() -> None:
    """As tensors of their own: kernels may compute parts of a row in another order."""
    given = torch.randn(5, 2, 3, 3), torch.randn(5, 4)
    found = unpack(pack(given), OUTPUTS)
    for one, other in zip(found, given, strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous()


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
