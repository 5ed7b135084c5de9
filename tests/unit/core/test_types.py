"""Gradient interfaces of float32 at modules of other types: what they give is rounded, no more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.interfaces import Boundary, GradientInterface, build_interface
from dni_runtime.spec import Choice, DataInfo, TensorSpec
from tests.specs import float32, int64, specs_of

TYPES = ["float64", "bfloat16", "float16"]


class Typed(nn.Sequential):
    """A linear layer of some type, whose outputs, and inputs, are of that type, too."""

    def __init__(self, inputs: int, outputs: int, dtype: str) -> None:
        super().__init__(nn.Linear(inputs, outputs, dtype=getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.to(self[0].weight.dtype))
        return y


def interface(name: str, dtype: str, **args: Any) -> GradientInterface:
    boundary = Boundary(
        activation=TensorSpec(shape=(6,), dtype=dtype),
        label=int64(),
        prediction=float32(3),
        classes=3,
        loss=Choice(name="CrossEntropyLoss"),
        optimizer=Choice(name="SGD", args={"lr": 0.1}),
    )
    torch.manual_seed(0)
    return build_interface(Choice(name=name, args=args), boundary)


def drawn(dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    h_BH, g_BH = torch.randn(2, 8, 6, generator=draw, dtype=torch.float64)
    y_B = torch.randint(0, 3, (8,), generator=draw)
    return h_BH.to(getattr(torch, dtype)), y_B, g_BH.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_local_gradient_is_that_of_the_head(dtype: str) -> None:
    local = interface("local", dtype)
    head = copy.deepcopy(local.head)
    h_BH, y_B, _ = drawn(dtype)
    plain_BH = h_BH.to(torch.float32).requires_grad_()
    F.cross_entropy(head(plain_BH), y_B, reduction="sum").backward()
    found = local.signal(h_BH, y_B)
    assert plain_BH.grad is not None
    assert found.g_BH.dtype is h_BH.dtype
    torch.testing.assert_close(found.g_BH, plain_BH.grad.to(h_BH.dtype))
    predicted = local.predict(h_BH)
    assert predicted is not None
    assert predicted.shape == (8, 3)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_predicted_gradient_is_learnt(dtype: str) -> None:
    optimizer = {"SGD": {"lr": 0.05}}
    synthetic = interface(
        "synthetic", dtype, synthesizer="linear", conditioned=False, optimizer=optimizer, scale=0.5
    )
    plain = nn.Linear(6, 6)
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    h_BH, y_B, g_BH = drawn(dtype)
    x_BH, wanted_BH = h_BH.to(torch.float32), g_BH.to(torch.float32)
    steps = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(3):
        late = synthetic.learn(h_BH, y_B, g_BH, measure=True)
        assert late is not None
        error = F.mse_loss(plain(x_BH), wanted_BH, reduction="sum")
        torch.testing.assert_close(late.error, error.detach() / wanted_BH.square().sum())
        steps.zero_grad()
        (error / len(x_BH)).backward()
        steps.step()
    found = synthetic.signal(h_BH, y_B).g_BH
    assert found.dtype is h_BH.dtype
    torch.testing.assert_close(found, (0.5 * plain(x_BH)).detach().to(h_BH.dtype))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["mixed", "synthetic", "local", "corrected"])
def test_a_chain_of_another_type_learns(name: str, dtype: str) -> None:
    defaults = f"{{interface: {name}, optimizer: {{Adam: {{lr: 0.02}}}}}}"
    text = f"name: typed\ndata: {{batch_size: 16}}\ndefaults: {defaults}\nmodules:\n"
    for module, sizes in (("a", "inputs: 12, outputs: 8"), ("b", "inputs: 8, outputs: 3")):
        layer = f"{{import: '{__name__}:Typed', args: {{{sizes}, dtype: {dtype}}}}}"
        text += f"- {{name: {module}, layers: [{layer}]}}\n"
    chain = LocalChain(specs_of(text, DataInfo(sample=float32(12), label=int64(), classes=3)))
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 12, generator=draw), torch.randint(0, 3, (16,), generator=draw)
    before = copy.deepcopy(chain.steps[0].layers.state_dict())
    losses = [float(chain.train_batch(x, y)) for _ in range(30)]
    assert losses[-1] < losses[0]
    for key, value in chain.steps[0].layers.state_dict().items():
        assert value.dtype is getattr(torch, dtype)
        assert not torch.equal(value, before[key])
