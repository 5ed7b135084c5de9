"""Batches in parts are trained on as whole ones are by plain torch, whatever their loss counts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.spec import DataInfo
from tests.specs import float32, int64, specs_of
from tests.unit.core.conftest import INFO
from tests.unit.core.test_numerics import batches

CHAIN = """\
name: parts
data: {{batch_size: 16}}
{loss}
defaults: {{interface: {{exact: {{micro_batches: {parts}}}}}, optimizer: {{SGD: {{lr: 0.5}}}}}}
modules:
- {{name: a, layers: [{{Linear: {{in_features: 12, out_features: 8}}}}, Tanh]}}
- {{name: b, layers: [{{Linear: {{in_features: 8, out_features: 8}}}}, Tanh]}}
- {{name: c, layers: [{last}]}}
"""
LINEAR = "{Linear: {in_features: 8, out_features: 3}}"
WEIGHT = [1.0, 5.0, 0.2]
FORK = "{import: 'tests.unit.core.outputs:Fork', args: {features: 8, right: 2}}"
TWO_LABELS = DataInfo(sample=float32(12), label=int64(2), labels=(int64(), int64()))
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def ignored(y: Tensor, number: int, by: int = -100) -> Tensor:
    """Labels of which the first part has only one that counts."""
    y = y.clone()
    y[: 3 + number % 2] = by
    y[5:15:3] = by
    return y


def cross_entropy(**args: object) -> Loss:
    return lambda network, x, y: F.cross_entropy(network(x), y, **args)  # type: ignore[arg-type]


def two(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    row = network(x)
    own = F.cross_entropy(row[:, :8], y[:, 0])
    return own + 0.5 * F.cross_entropy(row[:, 8:], y[:, 1], torch.tensor([3.0, 1.0]))


CASES = {
    "ignored": ("", cross_entropy()),
    "ignored by 255": (
        "loss: {CrossEntropyLoss: {ignore_index: 255}}",
        cross_entropy(ignore_index=255),
    ),
    "weights": (
        f"loss: {{CrossEntropyLoss: {{weight: {WEIGHT}, label_smoothing: 0.1}}}}",
        cross_entropy(weight=torch.tensor(WEIGHT), label_smoothing=0.1),
    ),
    "two": (
        "losses: [{loss: {CrossEntropyLoss: {}}, output: 0, label: 0}, {loss: {CrossEntropyLoss: "
        "{weight: [3.0, 1.0]}}, output: 1, label: 1, weight: 0.5}]",
        two,
    ),
}


@pytest.mark.parametrize("parts", [1, 4, 5])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("of", [LocalChain, Backprop])
def test_parts_count_by_their_labels(
    case: str, parts: int, of: type[LocalChain] | type[Backprop]
) -> None:
    text, loss = CASES[case]
    last, info = (FORK, TWO_LABELS) if case == "two" else (LINEAR, INFO)
    chain = of(specs_of(CHAIN.format(loss=text, parts=parts, last=last), info))
    network = nn.Sequential(*(copy.deepcopy(step.layers) for step in chain.steps))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for number, (x, y) in enumerate(batches(4)):
        y = ignored(y, number, by=255 if "255" in case else -100)
        if case == "two":
            y = torch.stack([y, ignored((x[:, 3] > 0).long(), number + 1).flip(0)], 1)
        expected = loss(network, x, y)
        expected.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
        optimizer.step()
        optimizer.zero_grad()
        found = chain.train_batch(x, y)
        torch.testing.assert_close(float(found), float(expected.detach()), rtol=1e-5, atol=1e-6)
    for number, step in enumerate(chain.steps):
        for name, value in step.layers.state_dict().items():
            wanted = network.state_dict()[f"{number}.{name}"]
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_batches_that_are_accumulated_count_alike() -> None:
    """As in the usual loop of torch, which divides each batch's loss by their number."""
    text = CHAIN.format(loss="", parts=1, last=LINEAR).replace(
        "defaults: {", "defaults: {accumulate: 2, "
    )
    chain = LocalChain(specs_of(text, INFO))
    network = nn.Sequential(*(copy.deepcopy(step.layers) for step in chain.steps))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for number, (x, y) in enumerate(batches(4)):
        y = ignored(y, number)
        chain.train_batch(x, y)
        (F.cross_entropy(network(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for number, step in enumerate(chain.steps):
        for name, value in step.layers.state_dict().items():
            torch.testing.assert_close(value, network.state_dict()[f"{number}.{name}"])


def test_parts_add_to_gradients_of_which_two_were_in_one_memory() -> None:
    last = "{import: 'tests.unit.core.outputs:TwoBiases', args: {features: 8, outputs: 3}}"
    chain = LocalChain(specs_of(CHAIN.format(loss="", parts=4, last=last), INFO))
    network = nn.Sequential(*(copy.deepcopy(step.layers) for step in chain.steps))
    ((x, y),) = batches(1)
    chain.train_batch(x, y)
    F.cross_entropy(network(x), y).backward()
    torch.optim.SGD(network.parameters(), lr=0.5).step()
    for number, step in enumerate(chain.steps):
        for name, value in step.layers.state_dict().items():
            torch.testing.assert_close(value, network.state_dict()[f"{number}.{name}"])
