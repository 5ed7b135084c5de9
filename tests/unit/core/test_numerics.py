"""Gradient interfaces against plain backpropagation and against autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.interfaces import Boundary
from dni_runtime.core.interfaces.synthetic import Synthetic, SyntheticOptions
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.synthesizers import SYNTHESIZERS, Critic, auto_synthesizer, build_synthesizer
from dni_runtime.core.synthesizers.base import LabelTerm
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from tests.specs import float32, int64, specs_of
from tests.unit.core.conftest import INFO

LABEL = int64()


def batches(count: int, size: int = 16, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, 12, generator=generator)
    return [(one, one[:, :3].argmax(1)) for one in x]


def parameters(chain: LocalChain) -> list[Tensor]:
    return [p.detach() for step in chain.steps for p in step.layers.state_dict().values()]


@pytest.mark.parametrize(
    ("interface", "optimizer"),
    [
        ("exact", "{Adam: {lr: 0.01}}"),
        ("exact", "{SGD: {lr: 0.1, momentum: 0.9}}"),
        ("delayed", "{Adam: {lr: 0.01}}"),
    ],
)
def test_without_delay_it_is_backprop_bit_for_bit(
    small: Any, interface: str, optimizer: str
) -> None:
    workers = small(interface, optimizer)
    chain, reference = LocalChain(workers), Backprop(workers)
    for x, y in batches(30):
        loss = chain.train_batch(x, y)
        assert loss == float(reference.train_batch(x, y))
    for ours, theirs in zip(parameters(chain), reference.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_a_cut_does_to_tensors_is_what_the_next_module_gets(small: Any) -> None:
    """Half of each activation and double of each gradient: the same as another scale of weights."""
    seen: list[tuple[str, int, tuple[int, ...]]] = []

    def down(cut: int, h: Tensor) -> Tensor:
        seen.append(("h", cut, tuple(h.shape)))
        return h * (cut == 1)

    def up(cut: int, g: Tensor) -> Tensor:
        seen.append(("g", cut, tuple(g.shape)))
        return g * (cut == 1)

    chain = LocalChain(small("exact"), down=down, up=up)
    before = [[p.clone() for p in step.layers.parameters()] for step in chain.steps]
    ((x, y),) = batches(1)
    chain.train_batch(x, y)
    shape = (16, 8)
    assert seen == [("h", 0, shape), ("h", 1, shape), ("g", 1, shape), ("g", 0, shape)]
    moved = [
        [not torch.equal(*pair) for pair in zip(step.layers.parameters(), old, strict=True)]
        for step, old in zip(chain.steps, before, strict=True)
    ]
    # zeros reach b and so c: only c's bias learns
    assert moved == [[False] * 3, [False] * 3, [False, True]]
    assert torch.equal(chain.predict(x), chain.predict(torch.zeros_like(x)))


def test_delayed_updates_only_when_the_gradient_comes(small: Any) -> None:
    chain = LocalChain(small("delayed"), delay=3)
    before = [p.clone() for p in chain.steps[0].layers.parameters()]
    data = batches(12)
    for x, y in data[:3]:
        chain.train_batch(x, y)
    assert all(map(torch.equal, before, chain.steps[0].layers.parameters()))
    assert chain.steps[0].waiting == 3
    for x, y in data[3:]:
        chain.train_batch(x, y)
    assert not any(map(torch.equal, before, chain.steps[0].layers.parameters()))
    assert chain.steps[0].counters.given_up == 0


IN_PLACE = """\
name: x
data: {{batch_size: 16}}
defaults: {{interface: {interface}}}
modules:
  - name: a
    layers: [{layers}, {{Linear: {{in_features: 12, out_features: 8}}}}]
  - name: b
    layers: [{layers}, {{Linear: {{in_features: 8, out_features: 8}}}}, {{ReLU: {{inplace: true}}}}]
  - name: c
    layers: [{{Linear: {{in_features: 8, out_features: 3}}}}]
"""


@pytest.mark.parametrize("interface", ["exact", "mixed", "local"])
@pytest.mark.parametrize(
    "layers",
    [
        "{ReLU: {inplace: true}}",
        "Flatten, {Sequential: [Identity, {ReLU: {inplace: true}}]}",
        "{Residual: [{ELU: {inplace: true}}]}",
    ],
)
def test_modules_leave_their_input_as_it_is(interface: str, layers: str) -> None:
    text = IN_PLACE.format(interface=interface, layers=layers)
    chain = LocalChain(specs_of(text, INFO))
    plain = LocalChain(specs_of(text.replace("true", "false"), INFO))
    for x, y in batches(3):
        before = x.clone()
        assert chain.train_batch(x, y) == plain.train_batch(x, y)
        assert torch.equal(x, before)
    assert isinstance(chain.steps[1].layers[-1], nn.ReLU)
    assert chain.steps[1].layers[-1].inplace, "others may"


def test_bootstrapped_gradient_comes_from_the_modules_own_signal(small: Any) -> None:
    """What goes up is the module's Jacobian applied to its own prediction."""
    step = ModuleStep(small("{synthetic: {bootstrapped: true}}")[1])
    interface = step.interface
    assert isinstance(interface, Synthetic)
    nn.init.normal_(interface.synthesizer.out.weight)
    weights = {k: v.clone() for k, v in step.layers.state_dict().items()}
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
    h = step.forward(1, x)
    predicted = interface.signal(h, y).g_BH
    (sent,) = step.update(y)
    step.layers.load_state_dict(weights)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(step.layers(leaf), leaf, predicted)
    torch.testing.assert_close(sent, expected)


ACTIVATIONS = {"vector": float32(6), "tokens": float32(5, 6), "maps": float32(4, 5, 5)}
ONLY_FOR = {"conv": ("maps",)}
FITS = [
    (name, kind, classes)
    for name in SYNTHESIZERS
    if name != "critic"
    for kind in ONLY_FOR.get(name, ACTIVATIONS)
    for classes in (3, None)
    if not (name == "classifier" and classes is None)
]


@pytest.mark.parametrize(("name", "kind", "classes"), FITS)
def test_synthesizers_start_at_zero_and_fit(name: str, kind: str, classes: int | None) -> None:
    activation = ACTIVATIONS[kind]
    torch.manual_seed(0)
    label = LABEL if classes else float32(2)
    synthesizer = build_synthesizer(Choice(name=name), activation, label, classes)
    h = torch.randn(32, *activation.shape)
    y = torch.randint(0, 3, (32,)) if classes else torch.randn(32, 2)
    assert torch.equal(synthesizer(h, y), torch.zeros_like(h))
    target = torch.tanh(h) - 0.5
    optimizer = torch.optim.Adam(synthesizer.parameters(), 0.04)
    for _ in range(60):
        error = (synthesizer(h, y) - target).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    assert float(error.detach()) < 0.8 * float(target.square().mean())
    alone = synthesizer(h[:1], y[:1])
    assert alone.shape == (1, *activation.shape), "a last batch may hold one sample"


@pytest.mark.parametrize(
    ("kind", "label", "classes", "expected"),
    [
        ("vector", (), 3, "mlp"),
        ("tokens", (), 3, "critic"),
        ("maps", (), 3, "critic"),
        ("tokens", (5,), 3, "critic"),
        ("tokens", (4,), 3, "linear"),
        ("maps", (5,), 3, "mlp"),
        ("tokens", (2,), None, "linear"),
        ("tokens", None, 3, "linear"),
        ("maps", (2,), None, "mlp"),
        ("maps", None, 3, "mlp"),
    ],
)
def test_the_default_synthesizer_is_chosen_by_shapes(
    kind: str, label: tuple[int, ...] | None, classes: int | None, expected: str
) -> None:
    of_label = None if label is None else int64(*label)
    assert auto_synthesizer(ACTIVATIONS[kind], of_label, classes).name == expected


@pytest.mark.parametrize("name", ["critic", "classifier"])
@pytest.mark.parametrize("label", [None, int64(4)])
def test_some_need_a_label_for_a_sample_or_for_each_token(
    name: str, label: TensorSpec | None
) -> None:
    with pytest.raises(SpecError, match=f"{name}' needs"):
        build_synthesizer(Choice(name=name), ACTIVATIONS["tokens"], label, 3)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ACTIVATIONS for name in ("auto", "linear", "low-rank", "mlp")]
    + [("maps", "conv")],
)
def test_of_several_labels_a_sample_gets_the_mean(kind: str, name: str) -> None:
    """Labels of places, as in segmentation, or of a sequence of another length."""
    label = int64(2, 3)
    synthesizer = build_synthesizer(
        Choice(name=name),
        ACTIVATIONS[kind],
        label,
        3,
        loss=ChainLoss(Choice(name="CrossEntropyLoss"), float32(3, 2, 3), label),
    )
    y = torch.randint(0, 3, (6, 2, 3))
    y[0, 0], y[1] = -100, -100
    terms = [one for one in synthesizer.modules() if isinstance(one, LabelTerm)]
    assert terms
    for term in terms:
        assert term.table is not None
        nn.init.normal_(term.table.weight)
        for row, own in zip(term(y.clamp_min(0), y >= 0), y, strict=True):
            rows = term.table.weight[own[own >= 0]]
            expected = rows.mean(0) if len(rows) else torch.zeros_like(row)
            torch.testing.assert_close(row, expected)
        torch.testing.assert_close(term(y[2:]), term(y[2:], y[2:] >= 0))
    h = torch.randn(6, *ACTIVATIONS[kind].shape)
    predicted, loss = synthesizer.lesson(h, y, torch.randn_like(h))
    loss.backward()
    assert predicted is not None
    assert predicted.shape == h.shape
    assert not predicted[1].any()
    assert terms[0].table is not None
    assert terms[0].table.weight.grad is not None


def critic(kind: str, **args: float) -> Critic:
    torch.manual_seed(0)
    choice = Choice(name="critic", args=args)
    synthesizer = build_synthesizer(choice, ACTIVATIONS[kind], LABEL, 3)
    assert isinstance(synthesizer, Critic)
    return synthesizer


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_critic_fits_gradients_of_another_classifier(kind: str) -> None:
    """Through the gradient's error alone: the label has no weight."""
    other = critic(kind, label_weight=0)
    nn.init.normal_(other.guess.weight, std=0.3)
    synthesizer = critic(kind, label_weight=0)
    h, y = torch.randn(256, *ACTIVATIONS[kind].shape), torch.randint(0, 3, (256,))
    g = other(h, y).detach()
    optimizer = torch.optim.Adam(synthesizer.parameters(), 0.02)

    def error(h: Tensor, y: Tensor, g: Tensor) -> float:
        with torch.no_grad():
            return float((synthesizer(h, y) - g).square().sum() / g.square().sum())

    assert error(h, y, g) > 0.5
    for _ in range(200):
        optimizer.zero_grad()
        synthesizer.lesson(h, y, g).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert error(h, y, g) < 0.05
    alone = h[:1], y[:1], g[:1]
    assert error(*alone) < 0.5, "a last batch may hold one sample"


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_critics_error_is_that_of_its_prediction(kind: str) -> None:
    """Though it is summed up over classes; its gradient is autograd's, differentiated twice."""
    synthesizer = critic(kind, grid=2, label_weight=0).double()
    shape = ACTIVATIONS[kind].shape
    h, g = torch.randn(2, 4, *shape, dtype=torch.double).requires_grad_()
    y = torch.tensor([0, 1, 2, 0])
    loss = cross_entropy(synthesizer.guess(synthesizer.grid(h)), y, reduction="sum")
    (predicted,) = torch.autograd.grad(loss, h, create_graph=True)
    error = (predicted - g).square().sum() / (predicted.detach().square().sum() + g.square().sum())
    parameters = list(synthesizer.parameters())
    expected = torch.autograd.grad(error, parameters)
    lesson = synthesizer.lesson(h, y, g)
    torch.testing.assert_close(synthesizer(h, y), predicted)
    torch.testing.assert_close(lesson.loss, error)
    torch.testing.assert_close(torch.autograd.grad(lesson.loss, parameters), expected)


def test_a_critic_learns_from_the_label_too() -> None:
    h, y, g = torch.randn(32, 6), torch.randint(0, 3, (32,)), torch.randn(32, 6)
    with_label, without = (critic("vector", label_weight=w).lesson(h, y, g).loss for w in (2, 0))
    own = cross_entropy(critic("vector").guess(h), y)
    torch.testing.assert_close(with_label - without, 2 * own)


def test_a_critic_stands_gradients_that_are_still_zero() -> None:
    """Those of a synthesizer downstream that has not learned yet."""
    synthesizer = critic("maps", label_weight=0)
    h, y = torch.randn(8, *ACTIVATIONS["maps"].shape), torch.randint(0, 3, (8,))
    loss = synthesizer.lesson(h, y, torch.zeros_like(h)).loss
    assert synthesizer(h, y).abs().max() > 0
    torch.testing.assert_close(loss, torch.tensor(1.0))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None or p.grad.isfinite().all() for p in synthesizer.parameters())


def test_regression_gradient_is_autograds(small: Any) -> None:
    """One SGD step of ``learn`` moves the weights by the gradient of the per-sample error."""
    torch.manual_seed(0)
    options = SyntheticOptions.model_validate(
        {"synthesizer": "linear", "optimizer": {"SGD": {"lr": 0.1}}}
    )
    interface = Synthetic(Boundary.of(small()[0]), options)
    for p in interface.synthesizer.parameters():
        nn.init.normal_(p, std=0.1)
    before = {k: v.clone() for k, v in interface.synthesizer.state_dict().items()}
    h, y, g = torch.randn(16, 8), torch.randint(0, 3, (16,)), torch.randn(16, 8)
    # By hand: error = 1/B sum_b |W h_b + E[y_b] + c - g_b|^2.
    residual = h @ before["out.weight"].T + before["out.bias"] + before["label.table.weight"][y] - g
    expected = {
        "out.weight": 2 / 16 * residual.T @ h,
        "out.bias": 2 / 16 * residual.sum(0),
        "label.table.weight": torch.zeros(3, 8).index_add_(0, y, 2 / 16 * residual),
    }
    late = interface.learn(h, y, g, measure=True)
    assert late is not None
    torch.testing.assert_close(late.error, residual.square().sum() / g.square().sum())
    for key, value in interface.synthesizer.state_dict().items():
        torch.testing.assert_close(before[key] - 0.1 * expected[key], value)


def test_a_critics_prediction_is_measured_before_it_learns(small: Any) -> None:
    interface = Synthetic(
        Boundary.of(small()[0]), SyntheticOptions.model_validate({"synthesizer": "critic"})
    )
    h, y, g = torch.randn(16, 8), torch.randint(0, 3, (16,)), torch.randn(16, 8)
    with torch.no_grad():
        predicted = interface.synthesizer(h, y)
    late = interface.learn(h, y, g, measure=True)
    assert late is not None
    torch.testing.assert_close(late.error, (predicted - g).square().sum() / g.square().sum())


def test_late_gradients_pair_by_id_in_a_bounded_store(small: Any) -> None:
    step = ModuleStep(small("{synthetic: {store: 3}}")[0])
    for id, (x, y) in enumerate(batches(5), start=1):
        step.forward(id, x)
        step.update(y)
    assert step.counters.given_up == 2
    step.late_gradient(1, torch.randn(16, 8))
    assert step.counters.unpaired == 1
    step.late_gradient(4, torch.randn(16, 8))
    assert (step.counters.gradients, step.counters.unpaired, step.counters.lag) == (2, 1, 1)
    step.late_gradient(4, torch.randn(16, 8))
    assert step.counters.unpaired == 2


def test_gradients_that_nobody_wants_are_not_computed(small: Any) -> None:
    """The paper's sparse updates: with ``learn_every: 3`` the tail answers ids 3, 6, ..."""
    stem, *_, tail = small("{synthetic: {learn_every: 3}}")
    assert tail.sources[0].gradients == stem.gradients_in == 3
    step = ModuleStep(tail)
    answered = []
    for id in range(1, 8):
        step.forward(id, torch.randn(16, *tail.inputs[0].shape))
        if step.update(torch.randint(0, 3, (16,))) != (None,):
            answered.append(id)
    assert answered == [3, 6]
    upstream = ModuleStep(stem)
    for id, (x, y) in enumerate(batches(7), start=1):
        upstream.forward(id, x)
        upstream.update(y)
    for id in answered:
        upstream.late_gradient(id, torch.randn(16, 8))
    assert (upstream.counters.unpaired, upstream.counters.given_up) == (0, 0)


def test_the_control_does_not_learn(small: Any) -> None:
    chain = LocalChain(small("none"))
    frozen = [{k: v.clone() for k, v in s.layers.named_parameters()} for s in chain.steps]
    for x, y in batches(3):
        chain.train_batch(x, y)
    for step, before in zip(chain.steps, frozen, strict=True):
        same = [torch.equal(v, before[k]) for k, v in step.layers.named_parameters()]
        assert not any(same) if step.interface is None else all(same)


@pytest.mark.parametrize("interface", ["local", "mixed: {local: {hidden: 6}}"])
def test_an_early_head_predicts_and_changes_nothing(interface: str, small: Any) -> None:
    step = ModuleStep(small("{" + interface + (": {}}" if ":" not in interface else "}"))[0])
    for id, (x, y) in enumerate(batches(20), start=1):
        step.forward(id, x)
        step.update(y)
    assert step.interface is not None
    parts = (step.interface, step.layers)
    before = [{k: v.clone() for k, v in part.state_dict().items()} for part in parts]
    random = torch.get_rng_state()
    [(x, y)] = batches(1, seed=1)
    p = step.predict(step.evaluate(x))
    assert p is not None
    assert p.shape == (16, 3)
    assert not p.requires_grad
    assert float((p.argmax(1) == y).float().mean()) > 1 / 3
    torch.testing.assert_close(step.predict(step.evaluate(x[:1])), p[:1])
    for part, state in zip(parts, before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in part.state_dict().items())
        assert all(module.training for module in part.modules())
    assert torch.equal(random, torch.get_rng_state())


def test_who_predicts(small: Any) -> None:
    h = torch.randn(16, 8)
    assert ModuleStep(small("synthetic")[0]).predict(h) is None
    assert ModuleStep(small("mixed")[2]).predict(h) is h


def test_the_heads_accuracy_is_measured_when_asked(small: Any) -> None:
    step = ModuleStep(small("local")[0])
    for id, (x, y) in enumerate(batches(3), start=1):
        step.forward(id, x)
        step.update(y)
    first = step.counters.head_accuracy.take()
    assert first is not None
    assert float(first) * 16 == round(float(first) * 16), "of one batch"
    assert step.counters.head_accuracy.take() is None
    step.measure_head = True
    step.forward(4, x)
    step.update(y)
    assert step.counters.head_accuracy.take() is not None


def test_a_head_without_classes_has_no_accuracy(small: Any) -> None:
    step = ModuleStep(small("local")[0].model_copy(update={"classes": None}))
    [(x, y)] = batches(1)
    step.forward(1, x)
    step.update(y)
    assert step.counters.head_accuracy.take() is None
    assert not step.classifies
