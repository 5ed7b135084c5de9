"""Estimated costs: what they count."""

from __future__ import annotations

from collections.abc import Callable

from dni_runtime.resolve.cost import estimated_costs
from dni_runtime.spec import LayerSpec, WorkerSpec
from tests.specs import float32


def linear(inputs: int, outputs: int) -> tuple[LayerSpec, ...]:
    return (LayerSpec(type="Linear", args={"in_features": inputs, "out_features": outputs}),)


def test_products_forward_and_backward(make_spec: Callable[..., WorkerSpec]) -> None:
    spec = make_spec("tail", layers=linear(4, 4))
    # 2 x 4 x 4 operations forward, twice that backward, 8 numbers in and out
    assert estimated_costs([spec]) == {"tail": 3 * 32 + 8}


def test_convolutions_weigh_by_their_area(make_spec: Callable[..., WorkerSpec]) -> None:
    args = {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 1}
    spec = make_spec(
        "tail",
        layers=(LayerSpec(type="Conv2d", args=args),),
        input=float32(2, 8, 8),
        output=float32(3, 8, 8),
    )
    work = 2 * 3 * 2 * 9 * 64
    assert estimated_costs([spec])["tail"] == 3 * work + (2 + 3) * 64


def test_what_cannot_run_on_the_meta_device_counts_its_parameters(
    make_spec: Callable[..., WorkerSpec],
) -> None:
    spec = make_spec("tail", layers=linear(4, 4), input=float32(5))
    assert estimated_costs([spec])["tail"] == 3 * 2 * (16 + 4) + 5 + 4
