"""Modules that are updated independently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from unlocked import UnlockedChain

from tests.unit.core.conftest import Chain

SYNTHETIC = "{synthetic: {synthesizer: {mlp: {hidden: 16}}}}"


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples whose class their first three features show."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 12, generator=generator)
    return x, x[:, :3].argmax(1)


def weights(chain: UnlockedChain, index: int) -> Tensor:
    return torch.cat([p.detach().flatten() for p in chain.steps[index].layers.parameters()])


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("probability", [0.4, 1.0])
def test_it_learns(small: Chain, inputs: bool, probability: float) -> None:
    chain = UnlockedChain(small(SYNTHETIC), inputs=inputs, probability=probability)
    for step in range(400):
        chain.train_batch(*batch(step))
    x, y = batch(-1)
    assert (chain.predict(x).argmax(1) == y).float().mean() > 0.8


def test_without_luck_nothing_changes(small: Chain) -> None:
    chain = UnlockedChain(small(SYNTHETIC), inputs=True, probability=0.0)
    before = [weights(chain, index) for index in range(3)]
    chain.train_batch(*batch())
    assert all(torch.equal(weights(chain, index), before[index]) for index in range(3))


@pytest.mark.parametrize("inputs", [False, True])
def test_synthetic_inputs_unlock_the_forward_pass(small: Chain, inputs: bool) -> None:
    """What the head computes matters to the module after it only where inputs are real."""
    after = []
    for scale in (1.0, 3.0):
        chain = UnlockedChain(small(SYNTHETIC), inputs=inputs)
        with torch.no_grad():
            chain.steps[0].layers[-2].bias.add_(scale)  # type: ignore[union-attr, operator]
        chain.train_batch(*batch())
        after.append(weights(chain, 2))
    assert torch.equal(*after) == inputs


def test_input_models_learn_what_modules_give(small: Chain) -> None:
    chain = UnlockedChain(small(SYNTHETIC), inputs=True)
    x, _ = batch()
    with torch.no_grad():
        h = chain.steps[0].layers(x)
    errors = [float(chain.inputs[0].learn(x, h)) for _ in range(200)]
    assert errors[-1] < 0.1 * errors[0]
