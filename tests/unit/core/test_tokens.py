"""Labels per token: early heads in both layouts, ``mixed``, and training with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.core.interfaces.local import HeadOptions, build_head
from dni_runtime.errors import SpecError
from dni_runtime.spec import DataInfo, WorkerSpec
from tests.specs import float32, int64, specs_of

TOKENS = float32(5, 8)
CHAIN = """\
name: tags
defaults: {interface: %s, optimizer: {Adam: {lr: 0.02}}}
metrics: [accuracy]
modules:
  - name: a
    layers:
      - Embedding: {num_embeddings: 12, embedding_dim: 16}
      - Linear: {in_features: 16, out_features: 16}
      - LayerNorm: {normalized_shape: 16}
      - ReLU
  - name: b
    layers:
      - Linear: {in_features: 16, out_features: 16}
      - LayerNorm: {normalized_shape: 16}
      - ReLU
  - name: c
    layers: [{Linear: {in_features: 16, out_features: 4}}%s]
"""
INFO = DataInfo(sample=int64(6), label=int64(6), classes=4)
SWAP = f", {{import: '{__name__}:Swap'}}"


class Swap(nn.Module):
    """From tokens first to classes first."""

    def forward(self, p: Tensor) -> Tensor:
        return p.mT


def workers(interface: str, layout: str = "last") -> tuple[WorkerSpec, ...]:
    return specs_of(CHAIN % (interface, SWAP if layout == "torch" else ""), INFO)


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The tag of a word is what is left of it modulo four; every third is padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 12, (count, 16, 6), generator=generator)
    return [(one, (one % 4).where(one % 3 != 0, -100)) for one in x]


@pytest.mark.parametrize("hidden", [None, 7])
@pytest.mark.parametrize("layout", ["last", "torch"])
def test_a_head_sees_each_token_alone(layout: str, hidden: int | None) -> None:
    shape = (5, 3) if layout == "last" else (3, 5)
    prediction = float32(*shape)
    head = build_head(TOKENS, prediction, HeadOptions(hidden=hidden), 2 - (layout == "torch"))
    kinds = [type(layer).__name__ for layer in head if not type(layer).__name__.startswith("_")]
    assert kinds == ["LayerNorm", *(["Linear", "GELU"] if hidden else []), "Linear"]
    h = torch.randn(4, 5, 8)
    p = head(h)
    assert p.shape == (4, *shape)
    other = h.clone()
    other[:, 2] += torch.randn(8)
    changed = (head(other) != p).any(0)
    places = changed.any(1) if layout == "last" else changed.any(0)
    assert places.tolist() == [False, False, True, False, False]


def test_numbers_per_token_have_tokens_first() -> None:
    head = build_head(TOKENS, float32(5, 2), HeadOptions())
    assert head(torch.randn(3, 5, 8)).shape == (3, 5, 2)


@pytest.mark.parametrize(("shape", "axis"), [((4, 3), 2), ((3, 4), 1), ((3, 5), None)])
def test_each_prediction_needs_a_token(shape: tuple[int, ...], axis: int | None) -> None:
    with pytest.raises(SpecError, match="cannot build a local head from 5 tokens"):
        build_head(TOKENS, float32(*shape), HeadOptions(), axis)


@pytest.mark.parametrize("layout", ["last", "torch"])
@pytest.mark.parametrize(
    "interface",
    [
        "local",
        "mixed",
        "{mixed: {local: {hidden: 8}}}",
        "{synthetic: {synthesizer: critic}}",
        "{synthetic: {synthesizer: classifier}}",
    ],
)
def test_chains_with_a_label_per_token_learn(interface: str, layout: str) -> None:
    chain = LocalChain(workers(interface, layout), delay=2)
    for x, y in batches(40):
        chain.train_batch(x, y)
    found = evaluate(chain.predict, batches(5, seed=1), chain.steps[-1].spec)
    assert found["accuracy"] > 0.95
    for step in chain.steps[:-1]:
        for x, y in batches(1, seed=2):
            p = step.predict(step.evaluate(x if step.spec.index == 0 else torch.randn(16, 6, 16)))
            assert p is None or p.shape == (len(y), *step.spec.prediction.shape)


def test_the_signal_is_the_heads_gradient_per_sample() -> None:
    step = LocalChain(workers("local")).steps[0]
    local: Any = step.interface
    h = torch.randn(16, 6, 16)
    ((_, y),) = batches(1)
    leaf = h.clone().requires_grad_()
    F.cross_entropy(local.head(leaf).movedim(-1, 1), y).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(local.signal(h, y).g_BH, 16 * leaf.grad)
    assert step.classifies
