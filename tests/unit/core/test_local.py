"""Local losses: heads, similarities, and layers like those of the next modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.interfaces import build_interface
from dni_runtime.core.interfaces.base import Boundary
from dni_runtime.core.interfaces.heads import HeadOptions, build_head
from dni_runtime.core.interfaces.local import Local
from dni_runtime.core.interfaces.similarity import SimilarityLoss, similarities
from dni_runtime.core.resolve import worker_specs
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, DataInfo, TensorSpec, WorkerSpec, parse_chain

LABEL = TensorSpec(shape=(), dtype="int64")
SHAPES = [(12,), (6, 5), (5, 9, 6), (5, 3, 1), (3, 4, 4)]


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, dtype="float32")


def boundary(*shape: int, label: TensorSpec = LABEL, classes: int | None = 4) -> Boundary:
    return Boundary(
        activation=spec(*shape),
        label=label,
        prediction=spec(4, *(label.shape if classes else ())),
        classes=classes,
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


def cosines(x_BF: Tensor) -> Tensor:
    """The paper's similarity matrix, pair by pair."""
    rows = []
    for one in x_BF:
        a = one - one.mean()
        row = []
        for other in x_BF:
            b = other - other.mean()
            row.append((a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_labels_are_alike_or_equally_unlike() -> None:
    matrix = similarities(F.one_hot(torch.tensor([0, 1, 1, 3]), 4).double())
    other = -1 / 3
    expected = [[1, other, other, other], [other, 1, 1, other], [other, 1, 1, other]]
    torch.testing.assert_close(matrix[:3], torch.tensor(expected).double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ignored", [False, True])
def test_similarity_is_that_of_the_paper(shape: tuple[int, ...], ignored: bool) -> None:
    """Value and gradient against a computation of each pair of samples."""
    torch.manual_seed(0)
    made = SimilarityLoss(spec(*shape), LABEL, 4).double()
    (weight,) = made.parameters()
    h_BH = torch.randn(6, *shape, dtype=torch.double, requires_grad=True)
    y_B = torch.tensor([3, 0, -100 if ignored else 1, 0, 2, 3])
    valid_B = y_B >= 0
    loss = made(h_BH, y_B, valid_B if ignored else None)
    found = torch.autograd.grad(loss, [h_BH, weight])

    if len(shape) == 3:
        z = F.conv2d(h_BH, weight, padding=1).flatten(2)
        several = z.shape[1] > 3
    elif len(shape) == 2:
        z, several = (h_BH @ weight.T).mT, True
    else:
        z, several = h_BH @ weight.T, False
    if several:  # the deviation over n places, n - 1 in its divisor
        apart = z - z.mean(2, keepdim=True)
        z = (apart.square().sum(2) / (z.shape[2] - 1)).sqrt()
    z, y_B = z.flatten(1)[valid_B], y_B[valid_B]
    labels = torch.zeros(len(y_B), 4, dtype=torch.double)
    labels[torch.arange(len(y_B)), y_B] = 1
    expected = (cosines(z) - cosines(labels)).square().sum() / len(y_B) ** 2
    torch.testing.assert_close(loss, expected)
    for one, other in zip(found, torch.autograd.grad(expected, [h_BH, weight]), strict=True):
        torch.testing.assert_close(one, other)


def test_maps_without_any_difference_have_finite_gradients() -> None:
    made = SimilarityLoss(spec(5, 4, 4), LABEL, 4)
    h_BH = torch.zeros(3, 5, 4, 4, requires_grad=True)
    made(h_BH, torch.tensor([0, 1, 1])).backward()
    assert h_BH.grad is not None
    assert h_BH.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_the_local_loss_is_shared_between_prediction_and_similarity() -> None:
    local = build_interface(Choice(name="local", args={"similarity": 0.9}), boundary(5, 6, 6))
    assert isinstance(local, Local)
    assert local.similarity is not None
    h_BH, y_B = torch.randn(7, 5, 6, 6, requires_grad=True), torch.randint(0, 4, (7,))
    loss = 0.1 * F.cross_entropy(local.head(h_BH), y_B) + 0.9 * local.similarity(h_BH, y_B)
    (expected,) = torch.autograd.grad(loss, h_BH)
    signal = local.signal(h_BH.detach(), y_B)
    torch.testing.assert_close(signal.g_BH, 7 * expected)
    assert signal.loss is not None
    torch.testing.assert_close(signal.loss, loss.detach())
    trained = {id(p) for group in local.optimizers()["head"].param_groups for p in group["params"]}
    assert trained == {id(p) for p in local.parameters()}


@pytest.mark.parametrize(
    ("label", "classes"),
    [(TensorSpec(shape=(6,), dtype="int64"), 4), (TensorSpec(shape=(4,), dtype="float32"), None)],
)
def test_similarity_needs_a_class_for_each_sample(label: TensorSpec, classes: int | None) -> None:
    with pytest.raises(SpecError, match="one class label for each") as error:
        build_interface(
            Choice(name="mixed", args={"local": {"similarity": 0.5}}),
            boundary(6, 5, label=label, classes=classes),
            ("here",),
        )
    assert error.value.location == ("here", "mixed", "local", "similarity")


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
    return worker_specs(parse_chain(CHAIN % (interface, channels)), INFO)


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The label is the row, of three, with the largest pixels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, 1, 8, 8, generator=generator)
    y = torch.randint(0, 3, (count, 16), generator=generator)
    for image, label in zip(x.flatten(0, 1), y.flatten(), strict=True):
        image[0, 1 + 2 * int(label)] += 2
    return list(zip(x, y, strict=True))


def test_a_head_looks_at_as_many_modules_as_there_are() -> None:
    for interface in ("{local: {lookahead: 2}}", "{mixed: {local: {lookahead: 2}}}"):
        a, b, c, d = workers(interface)
        assert a.ahead is not None
        assert [layer.type for layer in a.ahead.layers] == [
            *("Conv2d", "LazyBatchNorm2d", "Dropout", "ReLU"),
            *("LazyConv2d", "ReLU"),
        ]
        assert a.ahead.output == c.output
        assert not a.ahead.ends
        assert b.ahead is not None
        assert [layer.type for layer in b.ahead.layers[2:]] == ["Flatten", "Linear"]
        assert b.ahead.ends
        assert c.ahead is not None
        assert c.ahead.ends
        assert d.ahead is None
    assert all(worker.ahead is None for worker in workers("local"))


def test_an_image_depends_on_the_layers_that_its_head_looks_at() -> None:
    for interface, same in (("local", True), ("{local: {lookahead: 1}}", False)):
        first, other = workers(interface)[0], workers(interface, channels=6)[0]
        assert (first.hash == other.hash) is same


@pytest.mark.parametrize("interface", ["local", "mixed"])
@pytest.mark.parametrize(
    "options", ["lookahead: 1", "lookahead: 3", "head: mlp-sr", "similarity: 0.9", "pool: 2"]
)
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


def test_layers_ahead_have_weights_of_their_own_that_are_trained() -> None:
    chain = LocalChain(workers("{local: {lookahead: 1}}"))
    local = chain.steps[0].interface
    assert isinstance(local, Local)
    before = [p.clone() for p in local.head.parameters()]
    kernel, own = local.head[0][0].weight, chain.steps[1].layers[0].weight
    assert kernel.shape == own.shape
    assert not torch.equal(kernel, own)
    ((x, y),) = batches(1)
    chain.train_batch(x, y)
    assert not any(map(torch.equal, before, local.head.parameters()))


def test_heads_that_draw_are_seeded() -> None:
    """Each module draws as in a process of its own, its head's dropout, too."""
    results = []
    for _ in range(2):
        torch.manual_seed(torch.seed() % 1000)
        chain = LocalChain(workers("{local: {lookahead: 1}}"))
        for x, y in batches(3):
            chain.train_batch(x, y)
        results.append([p for step in chain.steps for p in step.layers.parameters()])
    assert all(map(torch.equal, *results))
