"""Local losses: heads, and chains that learn by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.interfaces import build_interface
from dni_runtime.core.interfaces.base import Boundary
from dni_runtime.core.interfaces.local import HeadOptions, Local, build_head
from dni_runtime.spec import Choice, DataInfo, TensorSpec, WorkerSpec
from tests.specs import float32, int64, specs_of

LABEL = int64()
SHAPES = [(12,), (6, 5), (5, 9, 6), (5, 3, 1), (3, 4, 4)]


def spec(*shape: int) -> TensorSpec:
    return float32(*shape)


def boundary(*shape: int) -> Boundary:
    return Boundary(
        activation=spec(*shape),
        label=LABEL,
        prediction=spec(4),
        classes=4,
        loss=Choice(name="CrossEntropyLoss"),
        optimizer=Choice(name="SGD", args={"lr": 0.0}),
    )


def kinds(head: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in head.modules() if not list(layer.children())]


CONVOLUTION = ["Conv2d", "BatchNorm2d", "ReLU"]
HIDDEN = ["Linear", "BatchNorm", "ReLU"]


def test_mlp_sr_of_maps_is_that_of_decoupled_greedy_learning() -> None:
    head = build_head(spec(8, 32, 16), spec(10), HeadOptions(head="mlp-sr"))
    pool = "AdaptiveAvgPool2d"
    assert kinds(head) == [pool, *CONVOLUTION * 3, pool, "Flatten", *HIDDEN * 2, "Linear"]
    reduced, last = (m for m in head.modules() if isinstance(m, nn.AdaptiveAvgPool2d))
    assert (reduced.output_size, last.output_size) == ((8, 4), (2, 2))
    linear = [m for m in head.modules() if isinstance(m, nn.Linear)]
    assert [m.in_features for m in linear] == [32, 32, 32]
    assert [m.out_features for m in linear] == [32, 32, 10]
    assert head(torch.randn(3, 8, 32, 16)).shape == (3, 10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hidden", [None, 7])
@pytest.mark.parametrize("kind", ["linear", "mlp-sr"])
@pytest.mark.parametrize("prediction", [(4,), (2, 3, 2)])
def test_heads_predict_in_the_chains_shape(
    shape: tuple[int, ...], hidden: int | None, kind: Any, prediction: tuple[int, ...]
) -> None:
    head = build_head(spec(*shape), spec(*prediction), HeadOptions(head=kind, hidden=hidden))
    assert head(torch.randn(3, *shape)).shape == (3, *prediction)
    widths = [m.out_features for m in head.modules() if isinstance(m, nn.Linear)][:-1]
    assert len(widths) == (2 if kind == "mlp-sr" else hidden is not None)
    assert hidden is None or set(widths) <= {hidden}


def test_mlp_sr_on_each_token_has_three_linear_layers() -> None:
    head = build_head(spec(5, 8), spec(5, 3), HeadOptions(head="mlp-sr"), 2)
    assert kinds(head) == ["LayerNorm", "Linear", "GELU", "Linear", "GELU", "Linear"]
    assert head(torch.randn(2, 5, 8)).shape == (2, 5, 3)


def test_the_signal_is_the_gradient_of_the_heads_loss() -> None:
    local = build_interface(Choice(name="local"), boundary(5, 6, 6))
    assert isinstance(local, Local)
    h_BH, y_B = torch.randn(7, 5, 6, 6, requires_grad=True), torch.randint(0, 4, (7,))
    loss = F.cross_entropy(local.head(h_BH), y_B)
    (expected,) = torch.autograd.grad(loss, h_BH)
    signal = local.signal(h_BH.detach(), y_B)
    torch.testing.assert_close(signal.g_BH, 7 * expected)
    assert signal.loss is not None
    torch.testing.assert_close(signal.loss, loss.detach())
    trained = {id(p) for group in local.optimizers()["head"].param_groups for p in group["params"]}
    assert trained == {id(p) for p in local.parameters()}


CHAIN = """\
name: maps
defaults: {interface: %s, optimizer: {Adam: {lr: 0.01}}}
modules:
  - name: a
    layers: [{Conv2d: {in_channels: 1, out_channels: 4, kernel_size: 3}}, {BatchNorm2d: {num_features: 4}}, ReLU]
  - name: b
    layers: [{Conv2d: {in_channels: 4, out_channels: %d, kernel_size: 3}}, {LazyBatchNorm2d: {}}, {Dropout: {p: 0.2}}, ReLU]
  - name: c
    layers: [{LazyConv2d: {out_channels: 6, kernel_size: 3}}, ReLU]
  - name: d
    layers: [Flatten, {Linear: {in_features: 24, out_features: 3}}]
"""  # noqa: E501
INFO = DataInfo(sample=spec(1, 8, 8), label=LABEL, classes=3)


def workers(interface: str, channels: int = 5) -> tuple[WorkerSpec, ...]:
    return specs_of(CHAIN % (interface, channels), INFO)


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The label is the row, of three, with the largest pixels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, 1, 8, 8, generator=generator)
    y = torch.randint(0, 3, (count, 16), generator=generator)
    for image, label in zip(x.flatten(0, 1), y.flatten(), strict=True):
        image[0, 1 + 2 * int(label)] += 2
    return list(zip(x, y, strict=True))


def test_an_image_does_not_depend_on_the_next_modules_layers() -> None:
    assert workers("local")[0].hash == workers("local", channels=6)[0].hash


@pytest.mark.parametrize("interface", ["local", "mixed"])
@pytest.mark.parametrize("options", ["head: mlp-sr", "pool: 2"])
def test_chains_of_maps_learn(interface: str, options: str) -> None:
    local = f"{{local: {{{options}}}}}"
    chain = LocalChain(workers(local if interface == "local" else f"{{mixed: {local}}}"), delay=2)
    data = batches(40)
    for x, y in data:
        chain.train_batch(x, y)
    ((x, y),) = batches(1, seed=1)
    for step in chain.steps:
        x = step.evaluate(x)
        p = step.predict(x)
        assert p is not None
        assert p.shape == (16, 3)
        assert float((p.argmax(1) == y).float().mean()) > 0.8


def test_modules_that_draw_are_seeded() -> None:
    """Each draws as in a process of its own."""
    results = []
    for _ in range(2):
        torch.manual_seed(torch.seed() % 1000)
        chain = LocalChain(workers("local"))
        for x, y in batches(3):
            chain.train_batch(x, y)
        results.append([p for step in chain.steps for p in step.layers.parameters()])
    assert all(map(torch.equal, *results))
