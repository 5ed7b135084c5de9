"""The chain's loss against torch's own, in both layouts, with ignored labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.losses import ChainLoss
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import Choice, DataInfo, TensorSpec, parse_chain
from tests.specs import float32, int64, refused, specs_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_index": 2},
    {"weight": [1.0, 0.5, 3.0, 2.0]},
    {"label_smoothing": 0.2},
    {"weight": [1.0, 0.5, 3.0, 2.0], "label_smoothing": 0.2, "ignore_index": 0},
]


def make(name: str, p: tuple[int, ...], y: tuple[int, ...], **args: Any) -> ChainLoss:
    choice = Choice(name=name, args=args)
    return ChainLoss(choice, float32(*p), _labels(y))


def _labels(shape: tuple[int, ...]) -> TensorSpec:
    return int64(*shape)


def torchs(p: Tensor, y: Tensor, args: dict[str, Any]) -> Tensor:
    weight = torch.tensor(args["weight"]) if "weight" in args else None
    return F.cross_entropy(p, y, **args | {"weight": weight})


@pytest.mark.parametrize("args", OPTIONS)
@pytest.mark.parametrize("layout", ["vector", "last", "torch"])
def test_it_is_torchs_mean_over_valid_labels(layout: str, args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shape = {"vector": (4,), "last": (5, 4), "torch": (4, 5)}[layout]
    p = torch.randn(6, *shape).requires_grad_()
    y = torch.randint(0, 4, (6,) if layout == "vector" else (6, 5))
    if "ignore_index" not in args:
        y.flatten()[::3] = -100
    loss = make("CrossEntropyLoss", shape, tuple(y.shape[1:]), **args)
    expected = torchs(p.movedim(-1, 1) if layout == "last" else p, y, args)
    torch.testing.assert_close(loss(p, y), expected)
    ours, theirs = (torch.autograd.grad(one, p)[0] for one in (loss(p, y), expected))
    torch.testing.assert_close(ours, theirs)
    ignored = y == args.get("ignore_index", -100)
    assert int(ignored.sum()) > 0
    rows, _ = loss.rows(ours, y)
    assert torch.equal(rows[ignored.flatten()], torch.zeros(int(ignored.sum()), 4))
    valid = loss.valid(y)
    assert valid is not None
    assert torch.equal(valid, ~ignored)


def test_where_both_layouts_fit_torchs_is_meant() -> None:
    p, y = torch.randn(2, 4, 4), torch.randint(0, 4, (2, 4))
    torch.testing.assert_close(make("CrossEntropyLoss", (4, 4), (4,))(p, y), F.cross_entropy(p, y))


def test_means_of_batches_weighted_by_their_counts_are_the_mean() -> None:
    torch.manual_seed(0)
    args = OPTIONS[-1]
    loss = make("CrossEntropyLoss", (4,), (), **args)
    p, y = torch.randn(12, 4), torch.randint(0, 4, (12,))
    parts = [(loss(a, b), loss.count(b)) for a, b in zip(p.split(5), y.split(5), strict=True)]
    total = sum(value * count for value, count in parts) / sum(count for _, count in parts)
    torch.testing.assert_close(total, loss(p, y))
    assert float(make("MSELoss", (4,), (4,)).count(p)) == 12


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "NLLLoss"])
@pytest.mark.parametrize("args", [{}, {"weight": [1.0, 0.0, 1.0]}])
def test_a_batch_that_is_ignored_altogether_teaches_nothing(
    name: str, args: dict[str, Any]
) -> None:
    loss = make(name, (3,), (), **args)
    p = torch.randn(2, 3).requires_grad_()
    y = torch.tensor([-100, 1 if args else -100])  # a weight of zero ignores a class, too
    value = loss(p.log_softmax(1), y)
    assert float(value.detach()) == 0
    value.backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None
    assert torch.equal(p.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("args", OPTIONS)
def test_the_difference_is_the_gradient_of_the_mean_times_the_rows(args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    scores = torch.randn(6, 4, dtype=torch.double).requires_grad_()
    y = torch.tensor([0, 1, 2, 3, -100, 1] if args.get("ignore_index") is None else [0, 1, 2] * 2)
    loss = make("CrossEntropyLoss", (5, 4), (5,), **args).on_scores(4).double()
    (expected,) = torch.autograd.grad(loss(scores, y), scores)
    torch.testing.assert_close(loss.difference(scores, y), 6 * expected)
    assert torch.autograd.gradcheck(lambda s: loss.difference(s, y), scores)


def test_on_scores_keeps_what_cross_entropies_have_in_common() -> None:
    narrow = make("NLLLoss", (4,), (), weight=[1.0, 2.0, 3.0, 4.0], ignore_index=1).on_scores(3)
    assert narrow.weight is not None
    assert (narrow.weight.tolist(), narrow.ignore_index) == ([1, 2, 3], 1)
    other = make("MultiMarginLoss", (4,), (), margin=2.0).on_scores(4)
    assert (other.weight, other.ignore_index, other.is_plain) == (None, -100, True)


@pytest.mark.parametrize("name", ["SoftMarginLoss", "HingeEmbeddingLoss"])
def test_labels_that_are_signs(name: str) -> None:
    loss = make(name, (1,), ())
    loss.check_labels(torch.tensor([1.0, -1.0]), "y")
    with pytest.raises(DataError, match=rf"y\[1\] is 0.0, but {name} takes -1 and 1") as info:
        loss.check_labels(torch.tensor([1.0, 0.0]), "y")
    assert "2 * y - 1" in str(info.value)


def test_labels_that_are_counts() -> None:
    with pytest.raises(DataError, match=r"y\[1\] is -1, but PoissonNLLLoss takes numbers from 0"):
        make("PoissonNLLLoss", (1,), ()).check_labels(torch.tensor([3, -1]), "y")


def test_a_divergence_is_divided_by_samples() -> None:
    p, y = torch.randn(6, 4).log_softmax(1), torch.rand(6, 4).softmax(1)
    for args in ({}, {"reduction": "mean"}, {"reduction": "batchmean"}):
        loss = ChainLoss(Choice(name="KLDivLoss", args=args), float32(4), float32(4))
        torch.testing.assert_close(loss(p, y), (y * (y.log() - p)).sum(1).mean())
    with pytest.raises(SpecError, match="reduction 'sum'"):
        make("KLDivLoss", (4,), (4,), reduction="sum")


CHAIN = """\
name: text
loss: %s
metrics: [accuracy]
modules:
  - name: a
    layers: [{Embedding: {num_embeddings: 6, embedding_dim: 8}}, {LayerNorm: {normalized_shape: 8}}]
    interface: %s
  - {name: b, layers: [{Linear: {in_features: 8, out_features: %d}}]}
"""
INFO = DataInfo(sample=int64(5), label=int64(5), classes=6)


@pytest.mark.parametrize("loss", ["CrossEntropyLoss", "{CrossEntropyLoss: {ignore_index: 0}}"])
def test_a_chain_with_a_label_per_token_is_backprop(loss: str) -> None:
    """Classes last, as a Linear gives them; one batch is ignored altogether."""
    workers = specs_of(CHAIN % (loss, "exact", 6), INFO)
    chain, reference = LocalChain(workers), Backprop(workers)
    generator = torch.Generator().manual_seed(0)
    for index in range(10):
        x = torch.randint(0, 6, (4, 5), generator=generator)
        y = torch.zeros_like(x) if index == 5 else x.roll(1, 1)
        assert chain.train_batch(x, y) == float(reference.train_batch(x, y))
    own = [p for step in chain.steps for p in step.layers.state_dict().values()]
    for ours, theirs in zip(own, reference.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


def test_too_few_scores_are_counted_along_the_class_axis() -> None:
    refused(CHAIN % ("CrossEntropyLoss", "exact", 5), INFO, "has 6 classes")


class Summed(torch.nn.Module):
    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(p, y, reduction="sum")


class Averaged(torch.nn.Module):
    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(p, y)


@pytest.mark.parametrize(("name", "fits"), [("Summed", False), ("Averaged", True)])
def test_a_users_loss_must_not_be_a_sum(name: str, fits: bool) -> None:
    chain = f"""\
name: own
loss: {{import: '{__name__}:{name}'}}
modules:
  - {{name: a, layers: [{{Linear: {{in_features: 4, out_features: 3}}}}]}}
"""
    info = DataInfo(sample=float32(4), label=_labels(()), classes=3)
    if fits:
        specs_of(chain, info)
        return
    refused(chain, info, "sum over the batch", ("loss",))


class Odd(torch.nn.Module):
    """A user's loss whose value torch does not train by."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, p: Tensor, y: Tensor) -> Any:
        if self.how == "each":
            return F.cross_entropy(p, y, reduction="none")
        loss = F.cross_entropy(p.detach() if self.how == "detached" else p, y)
        return {"number": loss.item(), "pair": (loss, p)}.get(self.how, loss)


OWN = """\
name: own
loss: {import: '%s', args: {%s}}
defaults: {interface: exact, optimizer: {SGD: {lr: 0.1}}}
modules:
  - {name: a, layers: [{Linear: {in_features: 4, out_features: 3}}]}
  - {name: b, layers: [{Linear: {in_features: 3, out_features: 3}}]}
"""
OWN_INFO = DataInfo(sample=float32(4), label=_labels(()), classes=3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("each", r"it returns \(2,\), not a scalar tensor"),
        ("number", "it returns float, not a scalar tensor"),
        ("pair", "it returns tuple, not a scalar tensor"),
        ("detached", "its value has no gradient, so nothing would be trained"),
    ],
)
def test_a_loss_is_a_scalar_with_a_gradient(how: str, message: str) -> None:
    refused(OWN % (f"{__name__}:Odd", f"how: {how}"), OWN_INFO, message, ("loss",))


class InPlace(torch.nn.Module):
    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        p -= p.mean(1, keepdim=True)
        p *= torch.tensor([-1.0, -2.0, -3.0])
        y %= 2
        return p.gather(1, y[:, None]).mean()


def test_a_loss_may_change_what_it_gets() -> None:
    """It is trained as by plain torch, and metrics see predictions and labels as they were."""
    specs = specs_of(OWN % (f"{__name__}:InPlace", ""), OWN_INFO)
    chain = LocalChain(specs)
    network = torch.nn.Sequential(*[layer for step in chain.steps for layer in step.layers])
    copy = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    copy.load_state_dict(network.state_dict())
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(6, 4, generator=draw), torch.arange(6) % 3
        optimizer.zero_grad()
        expected = InPlace()(copy(x), y.clone())
        expected.backward()
        optimizer.step()
        assert chain.train_batch(x, y) == pytest.approx(expected.item(), rel=1e-6)
        assert torch.equal(y, torch.arange(6) % 3)
    for ours, theirs in zip(network.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    evaluation, p = EvaluationSums.of(chain.steps[-1]), chain.predict(x)
    before = p.clone()
    evaluation.add(p, y)
    assert torch.equal(p, before)
    right = (before.argmax(1) == y).float().mean()
    assert evaluation.result()["accuracy"] == pytest.approx(right.item())


LABELS = (_labels(()), float32(2))
TWO = DataInfo(sample=float32(12), label=float32(3), labels=LABELS)
SEVERAL = """\
name: net
data: {batch_size: 16}
losses:
- {loss: {CrossEntropyLoss: {label_smoothing: 0.1}}, output: 0, label: 0}
- {loss: MSELoss, output: 1, label: 1, weight: 0.5}
defaults: {interface: %s, optimizer: {SGD: {lr: 0.1}}}
modules:
- {name: a, layers: [{Linear: {in_features: 12, out_features: 8}}, Tanh]}
- {name: b, layers: [{import: 'tests.unit.core.outputs:Fork', args: {features: 8, right: 2}}]}
"""


def test_several_losses_are_their_weighted_sum() -> None:
    """Of two outputs and two labels, beside torch's own losses and backpropagation."""
    specs = specs_of(SEVERAL % "exact", TWO)
    chain, reference = LocalChain(specs), Backprop(specs)
    assert str(specs[1].prediction) == "float32[B x 10]"
    torch.manual_seed(0)
    for _ in range(5):
        x, classes, numbers = torch.randn(16, 12), torch.randint(0, 8, (16,)), torch.randn(16, 2)
        with torch.no_grad():
            scores, p = reference.model[1][0](reference.model[0](x))
        expected = F.cross_entropy(scores, classes, label_smoothing=0.1)
        expected = expected + 0.5 * F.mse_loss(p, numbers)
        y = torch.cat([classes[:, None], numbers], 1)
        assert torch.equal(reference.train_batch(x, y), expected)
        assert chain.train_batch(x, y) == float(expected)
    for step, module in zip(chain.steps, reference.model, strict=True):
        for ours, theirs in zip(step.layers.parameters(), module.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_several_outputs_have_no_accuracy() -> None:
    """They are one row: its highest number may be of another output than the label."""
    text = SEVERAL.replace("label: 1, weight", "label: 0, weight").replace(
        "MSELoss", "CrossEntropyLoss"
    )
    text = text.replace("args: {features: 8, right: 2}", "args: {features: 8, right: 8}")
    info = DataInfo(sample=float32(12), label=int64(), classes=8)
    text = text.replace("{CrossEntropyLoss: {label_smoothing: 0.1}}", "CrossEntropyLoss")
    specs = specs_of(text % "exact", info)
    chain, x = LocalChain(specs), torch.randn(16, 12)
    evaluation = EvaluationSums.of(chain.steps[-1])
    evaluation.add(chain.predict(x), torch.randint(0, 8, (16,)))
    assert list(evaluation.result()) == ["loss"]
    refused(text % "exact" + "metrics: [accuracy]\n", info, "accuracy needs class labels")


def test_interfaces_with_a_head_learn_several_losses() -> None:
    chain = LocalChain(specs_of(SEVERAL % "mixed", TWO), delay=2)
    torch.manual_seed(0)
    losses = []
    for _ in range(200):
        x = torch.randn(16, 12)
        losses.append(chain.train_batch(x, torch.cat([x[:, :8].argmax(1)[:, None], x[:, 8:10]], 1)))
    assert sum(losses[-20:]) < 0.75 * sum(losses[:20])


@pytest.mark.parametrize(
    ("old", "new", "message", "at"),
    [
        ("output: 1", "output: 2", "there is no output 2: the last module has 2", (1, "output")),
        ("label: 1", "label: 2", "there is no label 2: the data has 2", (1, "label")),
        ("output: 1", "output: 0", "output 1 of the last module has no loss", ()),
        ("MSELoss", "MSELos", "unknown loss 'MSELos'", (1, "loss")),
        ("label: 0", "label: 1", r"the number of a class.* float32\[B x 8\] and", (0, "loss")),
    ],
)
def test_losses_that_do_not_fit(old: str, new: str, message: str, at: tuple[Any, ...]) -> None:
    error = refused((SEVERAL % "mixed").replace(old, new), TWO, message)
    assert error.location[: 1 + len(at)] == ("losses", *at)


def test_loss_and_losses() -> None:
    with pytest.raises(SpecError, match="'loss' and 'losses' exclude each other"):
        parse_chain("loss: MSELoss\n" + SEVERAL % "mixed")


class Tokens(torch.nn.Linear):
    """Scores of 4 classes for each of 5 tokens, and 2 numbers."""

    def __init__(self) -> None:
        super().__init__(8, 22)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y[:, :20].unflatten(1, (4, 5)), y[:, 20:]


def test_each_loss_of_a_sum_weighs_batches_by_its_own_labels() -> None:
    """As one batch of all samples would be; also when parts are merged, as those of replicas."""
    classes = int64(5)
    labels = DataInfo(sample=float32(12), label=float32(7), labels=(classes, float32(2)))
    text = SEVERAL.replace(
        "{CrossEntropyLoss: {label_smoothing: 0.1}}", "{CrossEntropyLoss: {weight: [1, 2, 3, 4]}}"
    )
    text = text.replace(
        "tests.unit.core.outputs:Fork', args: {features: 8, right: 2}", f"{__name__}:Tokens'"
    )
    tail = specs_of(text % "exact", labels)[1]
    loss = ChainLoss(tail.loss, tail.prediction, tail.label)
    torch.manual_seed(0)
    scores, numbers = torch.randn(12, 4, 5), torch.randn(12, 2, 2)
    y = torch.randint(0, 4, (12, 5))
    y[torch.rand(12, 5) < torch.linspace(0, 1, 12)[:, None]] = -100
    y[8:] = -100
    assert (y[4:8] == -100).any()
    expected = F.cross_entropy(scores, y, weight=torch.arange(1.0, 5)) + 0.5 * F.mse_loss(
        *numbers.unbind(1)
    )
    rows = torch.cat([scores.flatten(1), numbers[:, 0]], 1)
    targets = torch.cat([y.float(), numbers[:, 1]], 1)
    one, other = EvaluationSums(loss, ()), EvaluationSums(loss, ())
    for number, (p, part) in enumerate(zip(rows.split(4), targets.split(4), strict=True)):
        (one if number % 2 else other).add(p, part)
    one.merge(other.to_dict())
    assert one.result() == {"loss": pytest.approx(float(expected))}


class Margin(torch.nn.Module):
    """A loss with a scale, which may be trained, and the mean of what it has seen."""

    def __init__(
        self, trained: bool = False, follows: bool = False, plain: bool = False, warms: int = 0
    ) -> None:
        super().__init__()
        self.calls, self.warms = 0, warms
        self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=trained)
        self.plain = [torch.full((3,), 2.0, requires_grad=plain)]
        self.register_buffer("seen", torch.ones(()))
        self.follows = follows

    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        if self.follows:
            self.seen += 1
        self.calls += 1
        p = p * min(1.0, self.calls / self.warms) if self.warms else p
        return F.cross_entropy(self.scale * p * self.plain[0], y)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{}", None),
        ("{trained: true}", "'scale', which would not be trained"),
        ("{plain: true}", r"of the sizes \[3\], which would not be trained"),
        ("{follows: true}", "'seen', which is in no checkpoint"),
        ("{warms: 50}", "keeps numbers from batch to batch, which are in no checkpoint"),
    ],
)
def test_a_loss_has_no_state(args: str, message: str | None, several: bool) -> None:
    own = f"{{import: '{__name__}:Margin', args: {args}}}"
    text = f"""\
name: own
{f"losses: [{{loss: {own}, weight: 2.0}}]" if several else f"loss: {own}"}
modules:
  - {{name: a, layers: [{{Linear: {{in_features: 4, out_features: 3}}}}]}}
"""
    info = DataInfo(sample=float32(4), label=_labels(()), classes=3)
    if message is None:
        specs_of(text, info)
        return
    error = refused(text, info, message, ("losses" if several else "loss",))
    assert "move it into the last module" in str(error)


def test_each_loss_of_a_sum_checks_its_own_labels() -> None:
    tail = specs_of(SEVERAL % "exact", TWO)[-1]
    loss = ChainLoss(tail.loss, tail.prediction, tail.label)
    y = torch.tensor([[7.0, 100.0, -3.0], [-100.0, 0.5, 0.5]])
    loss.check_labels(y, "label ")
    with pytest.raises(DataError, match=r"label \[1\] is 8, but CrossEntropyLoss takes 0 to 7"):
        loss.check_labels(torch.tensor([[7.0, 0, 0], [8.0, 0, 0]]), "label ")
    with pytest.raises(DataError, match=r"label \[41, 1\] is nan, but MSELoss takes finite"):
        loss.check_labels(
            torch.tensor([[7.0, 0, 0], [3.0, 0, torch.nan]]), "label ", torch.tensor([40, 41])
        )


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_labels_that_are_no_numbers_are_found(bad: float) -> None:
    one = float32(1)
    loss, y_BY = ChainLoss(Choice(name="MSELoss"), one, one), torch.zeros(4, 1)
    loss.check_labels(y_BY, "y")
    y_BY[2] = bad
    with pytest.raises(DataError, match=rf"y\[2, 0\] is {bad}, but MSELoss takes finite"):
        loss.check_labels(y_BY, "y")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "args"),
    [("CrossEntropyLoss", {"weight": [1.0, 0.5, 3.0]}), ("NLLLoss", {"weight": [1.0, 0.5, 3.0]}),
     ("BCEWithLogitsLoss", {"pos_weight": [1.0, 0.5, 3.0]}),
     ("BCEWithLogitsLoss", {"pos_weight": 3.0, "weight": 2})],
)  # fmt: skip
def test_weights_have_the_predictions_type(
    name: str, args: dict[str, Any], dtype: torch.dtype
) -> None:
    """As torch asks for; in a chain file they are lists or one number."""
    numbers = name == "BCEWithLogitsLoss"
    loss = make(name, (3,), (3,) if numbers else (), **args)
    p = torch.randn(4, 3, dtype=dtype)
    y = torch.rand(4, 3, dtype=dtype) if numbers else torch.tensor([0, 2, 1, 0])
    wanted = getattr(torch.nn, name)(**{k: torch.tensor(v, dtype=dtype) for k, v in args.items()})(
        p, y
    )
    torch.testing.assert_close(loss(p, y), wanted)
