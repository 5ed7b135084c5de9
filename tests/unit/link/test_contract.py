"""Both ends derive the same contract from their own specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from dni_runtime.link.contract import LinkContract
from dni_runtime.link.tensors import from_buffers, to_buffers
from dni_runtime.spec import DataInfo, Dtype, LinksSpec, TensorSpec, WorkerSpec
from dni_runtime.spec.predicting import predicting
from dni_runtime.wire import HEADER_BYTES, TensorContract
from tests.specs import float32, int64, linear, specs_of

MakeSpec = Callable[..., WorkerSpec]


def test_both_ends_agree(make_spec: MakeSpec) -> None:
    up = LinkContract.of(one := make_spec("stem"), one.targets[0])
    down = LinkContract.of(one := make_spec("tail"), one.sources[0])
    assert up == down
    assert str(up) == "stem → tail"
    assert up.activation == TensorContract("h", "float32", (4,), 8)
    assert up.label == TensorContract("y", "int64", (), 8)
    assert up.gradient == TensorContract("g", "float32", (4,), 8)


@pytest.mark.parametrize(
    ("links", "activation", "gradient"),
    [
        (LinksSpec(), "float32", "float32"),
        (LinksSpec(dtype="bfloat16"), "bfloat16", "bfloat16"),
        (LinksSpec(dtype="bfloat16", gradient_dtype="float32"), "bfloat16", "float32"),
        (LinksSpec(gradient_dtype="float16"), "float32", "float16"),
    ],
)
def test_types_on_the_wire(
    make_spec: MakeSpec, links: LinksSpec, activation: str, gradient: str
) -> None:
    contract = LinkContract.of(one := make_spec(links=links), one.targets[0])
    assert contract.activation.dtype == activation
    assert contract.gradient is not None
    assert contract.gradient.dtype == gradient
    assert contract.dtype == "float32"


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("other", [1e6, float("nan"), float("inf")])
def test_what_is_predicted_does_not_depend_on_other_samples(dtype: str, other: float) -> None:
    info = DataInfo(sample=float32(4), label=int64(), classes=3)
    trained = specs_of(f"name: net\nlinks: {{dtype: {dtype}}}\n{linear(4, 4, 4, 3)}", info)
    links = [(one, edge) for one in predicting(trained) for edge in one.targets if edge.tensor]
    assert len(links) == 3, "the last one is that to the front"
    for module, edge in links:
        contract = LinkContract.of(module, edge)

        def sent(h: Tensor, contract: LinkContract = contract) -> Tensor:
            assert contract.activation is not None
            entries, buffers = to_buffers(h, contract.activation)
            return from_buffers(entries, [bytearray(one) for one in buffers], contract.dtype)

        assert edge.tensor is not None
        h = torch.randn(1, *edge.tensor.shape)
        assert torch.equal(sent(torch.cat([h, torch.full_like(h, other)]))[:1], sent(h))
    assert torch.equal(sent(h := 257.0 + h), h), "answers are not rounded"


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((4,), (4,)), ((3, 8, 8), (3, 1, 1)), ((16, 4), (1, 4)), ((3, 2, 8, 8), (3, 1, 1, 1))],
)
def test_scales_of_quantized_tensors(
    make_spec: MakeSpec, shape: tuple[int, ...], channels: tuple[int, ...]
) -> None:
    links = LinksSpec(dtype="int8", gradient_dtype="int8-channel")
    output = float32(*shape)
    contract = LinkContract.of(one := make_spec(links=links, output=output), one.targets[0])
    assert contract.activation == TensorContract("h", "int8", shape, 8, scale=())
    assert contract.gradient == TensorContract("g", "int8", shape, 8, scale=channels)
    assert (contract.down.tensors, contract.up.tensors) == (3, 2)
    assert contract.agreement["activations on the wire"] == "int8"
    assert contract.agreement["gradients on the wire"] == "int8-channel, 1 in 1"


def test_gradients_travel_as_activations_do(make_spec: MakeSpec) -> None:
    contract = LinkContract.of(
        one := make_spec(links=LinksSpec(dtype="int8-channel")), one.targets[0]
    )
    assert contract.gradient is not None
    assert contract.gradient.scale == (4,)


def test_integers_that_a_module_gives_are_not_quantized(make_spec: MakeSpec) -> None:
    spec = make_spec(output=TensorSpec(shape=(4,), dtype="int8"), gradients_in=0)
    assert LinkContract.of(spec, spec.targets[0]).activation == TensorContract("h", "int8", (4,), 8)


def test_no_gradients_where_none_are_wanted(make_spec: MakeSpec) -> None:
    contract = LinkContract.of(one := make_spec(gradients_in=0), one.targets[0])
    assert contract.gradient is None
    assert contract.agreement["gradients on the wire"] == "none"
    assert contract.up.tensors == 0


def test_limits_hold_the_largest_batch_and_no_more(make_spec: MakeSpec) -> None:
    contract = LinkContract.of(one := make_spec(batch_limit=1 << 16), one.targets[0])
    assert contract.down.buffer_bytes == contract.up.buffer_bytes == 1 << 20
    assert contract.frame_limit("input") == 4 << 20


def test_the_frame_limit_lets_every_header_through(make_spec: MakeSpec) -> None:
    contract = LinkContract.of(one := make_spec(gradients_in=0), one.targets[0])
    assert contract.frame_limit("output") > HEADER_BYTES
