"""Ignored labels teach nothing: no signal for their samples, no lesson from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.interfaces import Boundary, GradientInterface, build_interface
from dni_runtime.core.interfaces.synthetic import Synthetic
from dni_runtime.core.synthesizers import SYNTHESIZERS, Critic, build_synthesizer
from dni_runtime.spec import Choice
from tests.specs import float32, int64

ACTIVATIONS = {"vector": float32(6), "tokens": float32(5, 6), "maps": float32(6, 4, 4)}
FITS = [(name, "maps" if name == "conv" else kind)
        for name in SYNTHESIZERS for kind in ("vector", "tokens") if name != "conv" or kind == "tokens"]  # fmt: skip  # noqa: E501


def boundary(kind: str, per_token: bool = False, **args: Any) -> Boundary:
    label, prediction = ((5,), (5, 4)) if per_token else ((), (4,))
    return Boundary(
        activation=ACTIVATIONS[kind],
        label=int64(*label),
        prediction=float32(*prediction),
        classes=4,
        loss=Choice(name="CrossEntropyLoss", args=args),
        optimizer=Choice(name="SGD", args={"lr": 1.0}),
    )


def synthetic(at: Boundary, name: str, **options: Any) -> Synthetic:
    torch.manual_seed(0)
    given = {"synthesizer": {name: options}, "optimizer": {"SGD": {"lr": 1.0}}}
    interface = build_interface(Choice(name="synthetic", args=given), at)
    assert isinstance(interface, Synthetic)
    for p in interface.synthesizer.parameters():
        nn.init.normal_(p, std=0.3)
    return interface


@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize(("name", "kind"), FITS)
def test_an_ignored_sample_gets_no_gradient(name: str, kind: str, ignored: int) -> None:
    interface = synthetic(boundary(kind, ignore_index=ignored), name)
    h = torch.randn(8, *ACTIVATIONS[kind].shape)
    y = torch.tensor([1, 2, ignored, 3, ignored, 1, 2, 3])
    g = interface.signal(h, y).g_BH
    assert torch.equal(g[y == ignored], torch.zeros_like(g[y == ignored]))
    assert (g[y != ignored] != 0).flatten(1).any(1).all()


@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize(("name", "kind"), FITS)
def test_nothing_is_learned_from_ignored_samples(name: str, kind: str, ignored: int) -> None:
    interface = synthetic(boundary(kind, ignore_index=ignored), name)
    h = torch.randn(8, *ACTIVATIONS[kind].shape)
    before = [p.clone() for p in interface.synthesizer.parameters()]
    y, g = torch.full((8,), ignored), torch.zeros_like(h)
    late = interface.learn(h, y, g, measure=True)
    assert late is not None
    assert float(late.error) == 0
    assert all(map(torch.equal, before, interface.synthesizer.parameters()))


@pytest.mark.parametrize("name", ["linear", "low-rank", "mlp", "conv"])
def test_class_0_is_not_taught_by_ignored_labels(name: str) -> None:
    kind = "maps" if name == "conv" else "vector"
    interface = synthetic(boundary(kind), name)
    h = torch.randn(8, *ACTIVATIONS[kind].shape)
    y = torch.tensor([1, -100, 2, -100, 3, 1, 2, 3])
    tables = [one for one in interface.synthesizer.modules() if isinstance(one, nn.Embedding)]
    before = [table.weight[0].clone() for table in tables]
    interface.learn(h, y, torch.randn_like(h), measure=False)
    assert before
    assert all(torch.equal(old, new.weight[0]) for old, new in zip(before, tables, strict=True))
    assert all((table.weight.grad[1:] != 0).any() for table in tables)


def test_a_critics_lesson_is_the_chains_loss() -> None:
    args = {"ignore_index": 0, "weight": [1.0, 2.0, 0.5, 3.0], "label_smoothing": 0.1}
    critic = synthetic(boundary("vector", **args), "critic").synthesizer
    assert isinstance(critic, Critic)
    h, g, y = torch.randn(8, 6), torch.randn(8, 6), torch.tensor([1, 0, 2, 0, 3, 1, 2, 3])
    with_label, without = critic.lesson(h, y, g).loss, _without_label(critic, h, y, g)
    expected = F.cross_entropy(
        critic.guess(h), y, torch.tensor(args["weight"]), ignore_index=0, label_smoothing=0.1
    )
    torch.testing.assert_close(with_label - without, expected)


def _without_label(critic: Critic, h: Tensor, y: Tensor, g: Tensor) -> Tensor:
    critic.label_weight = 0.0
    loss = critic.lesson(h, y, g).loss
    critic.label_weight = 1.0
    return loss


@pytest.mark.parametrize("args", [{}, {"ignore_index": 2}, {"weight": [1.0, 2.0, 0.5, 3.0]}])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_critic_predicts_the_per_sample_gradient_of_its_loss(
    per_token: bool, args: dict[str, Any]
) -> None:
    """That is B times the gradient of the mean over valid labels, of tokens, too."""
    kind = "tokens" if per_token else "maps"
    critic = synthetic(boundary(kind, per_token, **args), "critic", grid=2).synthesizer
    assert isinstance(critic, Critic)
    h = torch.randn(6, *ACTIVATIONS[kind].shape).requires_grad_()
    y = torch.randint(0, 4, (6, 5) if per_token else (6,))
    y[0] = args.get("ignore_index", -100)
    (expected,) = torch.autograd.grad(
        critic.label_loss(critic.guess(critic.grid(h)), y.flatten()), h
    )
    with torch.no_grad():
        g = critic.predict(h, y)
    torch.testing.assert_close(g, 6 * expected)
    assert torch.equal(g[0], torch.zeros_like(g[0]))


def test_tokens_with_ignored_labels_have_no_label_term_nor_difference() -> None:
    at = boundary("tokens", per_token=True)
    y = torch.tensor([[1, -100, 2, 3, -100]])
    for name in ("linear", "classifier", "critic"):
        synthesizer = synthetic(at, name).synthesizer
        h = torch.randn(1, 5, 6).expand(3, 5, 6)
        other = y.where(y == -100, (y + 1) % 4).expand(3, 5)
        with torch.no_grad():
            a, b = synthesizer.predict(h, y.expand(3, 5)), synthesizer.predict(h, other)
        same = (a == b).all(-1)[0]
        assert same.tolist() == (y[0] == -100).tolist()


@pytest.mark.parametrize("interface", ["local", "mixed"])
def test_early_heads_leave_ignored_samples_out(interface: str) -> None:
    torch.manual_seed(0)
    built: GradientInterface = build_interface(Choice(name=interface), boundary("vector"))
    h, y = torch.randn(8, 6), torch.tensor([1, -100, 2, -100, 3, 1, 2, 0])
    signal = built.signal(h, y)
    assert signal.loss is not None
    assert signal.p_BP is not None
    torch.testing.assert_close(signal.loss, F.cross_entropy(signal.p_BP, y))
    assert torch.equal(signal.g_BH[y == -100], torch.zeros(2, 6))
    signal = built.signal(h, torch.full((8,), -100))
    assert signal.loss is not None
    assert float(signal.loss) == 0
    assert torch.equal(signal.g_BH, torch.zeros(8, 6))


def test_without_a_loss_labels_below_zero_are_ignored() -> None:
    label = int64()
    synthesizer = build_synthesizer(Choice(name="linear"), ACTIVATIONS["vector"], label, 4)
    nn.init.normal_(synthesizer.label.table.weight)  # type: ignore[union-attr]
    g = synthesizer.predict(torch.randn(2, 6), torch.tensor([-100, 1]))
    assert torch.equal(g[0], torch.zeros(6))
    assert (g[1] != 0).any()
