"""True gradients that come late: lessons, what is kept for them, micro-batches, bounds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dni_runtime.core.chain import Backprop, LocalChain, parts_of
from dni_runtime.core.forward import ModuleForward
from dni_runtime.core.passes import ForwardPasses
from dni_runtime.core.step import ModuleStep
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Part
from tests.specs import specs_of
from tests.unit.core.conftest import CHAIN, INFO
from tests.unit.core.test_numerics import batches, parameters


def taught(chain: LocalChain, cut: int) -> list[Tensor]:
    """What the interface at a cut is taught from now on."""
    interface = chain.steps[cut].interface
    assert interface is not None
    lessons: list[Tensor] = []
    learn = interface.learn

    def spy(h: Tensor, y: Tensor, g: Tensor, *, measure: bool) -> Any:
        lessons.append(g.clone())
        return learn(h, y, g, measure=measure)

    interface.learn = spy  # type: ignore[method-assign]
    return lessons


@pytest.mark.parametrize("below", ["mixed", "synthetic", "local", "none", "delayed", "exact"])
def test_lessons_are_the_true_gradient(small: Any, below: str) -> None:
    """dL/dh by autograd through the whole network, whatever the interface below the cut."""
    first, *_ = small("synthetic")
    _, second, tail = small(below, "{SGD: {lr: 0.0}}")
    true = {"gradients": 1, "bootstrapped": False}

    def taught_by(worker: WorkerSpec) -> WorkerSpec:
        edges = tuple(edge.model_copy(update=true) for edge in worker.sources)
        return worker.model_copy(update={"sources": edges, "gradients_in": 1})

    chain = LocalChain([first, taught_by(second), taught_by(tail)])
    lessons = taught(chain, 0)
    ((x, y),) = batches(1)
    network = copy.deepcopy([step.layers for step in chain.steps])
    chain.train_batch(x, y)
    h = network[0](x).detach().requires_grad_()
    loss = nn.functional.cross_entropy(network[2](network[1](h)), y, reduction="sum")
    (expected,) = torch.autograd.grad(loss, h)
    (lesson,) = lessons
    torch.testing.assert_close(lesson, expected)


def test_the_modules_own_update_does_not_wait_for_lessons(small: Any) -> None:
    """With true lessons and with bootstrapped ones the weights move alike, until lessons differ."""
    chains = [
        LocalChain(small(f"{{synthetic: {{bootstrapped: {bootstrapped}}}}}"), delay=3)
        for bootstrapped in ("true", "false")
    ]
    for x, y in batches(4):
        for chain in chains:
            chain.train_batch(x, y)
    for ours, theirs in zip(*map(parameters, chains), strict=True):
        assert torch.equal(ours, theirs)


def test_lateness_adds_up_link_by_link(small: Any) -> None:
    chain = LocalChain(small("synthetic"), delay=[3, 2])
    for x, y in batches(12):
        chain.train_batch(x, y)
    assert [step.counters.lag_max for step in chain.steps] == [5, 2, 0]
    with pytest.raises(ValueError, match="1 delays for 2 links"):
        LocalChain(small("synthetic"), delay=[1])


def test_no_lesson_is_lost_to_a_store_that_is_too_small(small: Any) -> None:
    chain = LocalChain(small("synthetic"), delay=40)
    for x, y in batches(100):
        chain.train_batch(x, y)
    assert [step.counters.given_up for step in chain.steps] == [0, 0, 0]
    assert chain.steps[0].counters.gradients == 20


def layers(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "dense": nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)),
        "dropout": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6)),
        "conv": nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1), nn.Flatten()
        ),
        "attention": nn.Sequential(
            nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True)
        ),
        "lstm": nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 6)),
    }
    return made[kind]


KINDS = ["dense", "conv", "attention"]


def passes(
    module: nn.Module, keep: str, precision: torch.dtype, version: Callable[[], int] = lambda: 0
) -> ForwardPasses:
    spec = specs_of(CHAIN % ("exact", "Adam"), INFO)[0]
    name = str(precision).removeprefix("torch.")
    forward = ModuleForward(spec.model_copy(update={"precision": name}))
    forward.layers = module  # type: ignore[assignment]  # any will do
    return ForwardPasses(forward, keep, version)  # type: ignore[arg-type]


def gradients(module: nn.Module, h: Tensor, x: Tensor, g: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(h, [x, *module.parameters()], g))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", ["weights", "input"])
def test_gradients_of_a_pass_that_outlives_an_update(
    kind: str, keep: str, precision: torch.dtype
) -> None:
    """``weights``: as if the weights had not changed; ``input``: as if they were there before."""
    module = layers(kind)
    now = copy.deepcopy(module)
    with torch.no_grad():
        for p in now.parameters():
            p.add_(0.3 * torch.randn_like(p))
    x = torch.randn(8, 6)
    g = torch.randn_like(passes(module, "graph", precision).compute((x,)).h_BH)
    then = copy.deepcopy(module)
    kept = passes(module, keep, precision)
    done = kept.compute((x,), grads=[True], outlives=True)
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    with torch.no_grad():
        for p, new in zip(module.parameters(), now.parameters(), strict=True):
            p.copy_(new)
    found = gradients(module, kept.output(done), *done.xs, g)
    reference = then if keep == "weights" else now
    fresh = passes(reference, "graph", precision).compute((x,), grads=[True])
    expected = gradients(reference, fresh.h_BH, *fresh.xs, g)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for name, b in module.named_buffers():
        assert torch.equal(b, buffers[name]), "statistics count a batch once"


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_kept_graph_uses_the_weights_of_now(precision: torch.dtype) -> None:
    """By hand, for two linear layers: activations of then, weights of now, in both precisions."""
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    module = nn.Sequential(a, nn.Tanh(), b)
    kept = passes(module, "graph", precision)
    x = torch.randn(5, 4)
    done = kept.compute((x,), grads=[True], outlives=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, precision is torch.bfloat16):
        t = torch.tanh(a(x)).float()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    g = torch.randn(5, 4)
    g_x, g_a, g_b = gradients(module, done.h_BH, *done.xs, g)
    u = (g @ b.weight) * (1 - t * t)
    close = {"rtol": 0.05, "atol": 0.05} if precision is torch.bfloat16 else {}
    torch.testing.assert_close(g_x, u @ a.weight, **close)
    torch.testing.assert_close(g_a, u.T @ x, **close)
    torch.testing.assert_close(g_b, g.T @ t, **close)


def saved_bytes(
    keep: str, precision: torch.dtype, updates: bool, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Memory that eight passes keep beside the module's own."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    done: list[Any] = []
    kept = passes(module, keep, precision, lambda: len(done) if updates else 0)
    found: dict[int, Tensor] = {}

    class Watched(saved_tensors_hooks):
        def __init__(self, pack: Any, unpack: Any) -> None:
            def watch(tensor: Tensor) -> Any:
                packed = pack(tensor)
                memory = packed.value if hasattr(packed, "value") else packed._memory
                found[memory.untyped_storage().data_ptr()] = memory
                return packed

            super().__init__(watch, unpack)

    monkeypatch.setattr("dni_runtime.core.passes.saved_tensors_hooks", Watched)
    for _ in range(8):
        done.append(kept.compute((torch.randn(2, 64),), outlives=True))
    return sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in own)


WEIGHTS = 2 * 64 * 64  # numbers in the weights that the backward pass needs


@pytest.mark.parametrize(("precision", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_memory_of_what_is_kept(
    precision: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has no copy of a weight, in either precision; stashing one for each update."""
    activations = 8 * 3 * 2 * 64 * 4 * 2
    assert saved_bytes("graph", precision, True, monkeypatch) < activations
    assert saved_bytes("input", precision, True, monkeypatch) == 0
    stashed = saved_bytes("weights", precision, True, monkeypatch)
    assert 8 * WEIGHTS * size <= stashed < 8 * WEIGHTS * size * 1.5 + activations
    assert saved_bytes("weights", precision, False, monkeypatch) < 2 * WEIGHTS * size + activations


def test_a_pass_computed_again_draws_the_same_random_numbers() -> None:
    module = layers("dropout")
    kept = passes(module, "input", torch.float32)
    x = torch.randn(8, 6)
    state = torch.get_rng_state()
    done = kept.compute((x,), grads=[True], outlives=True)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = kept.output(done)
    assert torch.equal(again, done.h_BH)
    assert again.requires_grad
    assert torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(state)
    module(x)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize(("size", "count"), [(16, 1), (16, 4), (9, 4), (5, 4), (3, 8), (2, 2)])
def test_parts_of_a_batch(size: int, count: int) -> None:
    x, y = torch.randn(size, 3), torch.arange(size)
    parts = list(parts_of(x, y, count))
    assert torch.equal(torch.cat([one for _, one, _ in parts]), x)
    assert torch.equal(torch.cat([one for _, _, one in parts]), y)
    assert len(parts) <= count
    assert all(len(one) > 1 for _, one, _ in parts), "BatchNorm needs two samples"
    assert [part.first for part, *_ in parts] == [int(one[0]) for *_, one in parts]
    assert [part.ends_with(len(one)) for part, one, _ in parts][-1]
    assert not any(part.ends_with(len(one)) for part, one, _ in parts[:-1])


@pytest.mark.parametrize("size", [16, 11])
@pytest.mark.parametrize("options", ["", ", accumulate: 3"])
def test_micro_batches_are_backprop_with_accumulation(small: Any, size: int, options: str) -> None:
    """One update for each batch, of the sum of its parts' gradients."""
    workers = small(f"{{exact: {{micro_batches: 4}}}}{options}", "{SGD: {lr: 0.1, momentum: 0.5}}")
    chain, reference = LocalChain(workers), Backprop(workers)
    count = 30 if size == 16 else 4
    for x, y in batches(count, size):
        chain.train_batch(x, y)
        reference.train_batch(x, y)
    for ours, theirs in zip(parameters(chain), reference.model.state_dict().values(), strict=True):
        if size == 16:
            assert torch.equal(ours, theirs)
        else:  # a part's weight in its batch is no power of two
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert [step.batches for step in chain.steps] == [count] * 3


@pytest.mark.parametrize("interface", ["mixed", "local", "delayed"])
def test_lost_parts_end_their_batch(small: Any, interface: str) -> None:
    """A gap in the stream loses what was in it, and no more."""
    step = ModuleStep(small(interface)[0])
    ((x, y),) = batches(1)
    for id, part in ((1, Part(0, 32)), (3, Part(0, 32)), (4, Part(16, 32)), (6, Part(16, 32))):
        step.forward(id, x, part)
        step.update(y)
    for id in (1, 3, 4, 6):
        step.late_gradient(id, torch.randn(16, 8))
    assert step.batches == 3
    assert not any(p.grad is not None for p in step.layers.parameters())


@pytest.mark.parametrize(("interface", "bound"), [("exact", 0), ("{delayed: {max_late: 2}}", 2)])
def test_a_module_waits_before_it_is_too_late(small: Any, interface: str, bound: int) -> None:
    step = ModuleStep(small(interface)[0])
    data = batches(5)
    for id, (x, y) in enumerate(data[: bound + 1], start=1):
        assert not step.blocked
        step.forward(id, x)
        step.update(y)
    assert step.blocked
    step.late_gradient(1, torch.randn(16, 8))
    assert not step.blocked
    step.forward(9, data[4][0], Part(0, 32))
    step.update(data[4][1])
    assert not step.blocked, "the rest of a batch is no new one"


def test_one_update_late_is_gradient_descent_with_old_gradients(small: Any) -> None:
    """PipeDream-2BW: w(t+1) = w(t) - lr * grad(w(t-1), batch t), in each module."""
    rate = 0.05
    text = "{delayed: {max_late: 1, keep: weights}}"
    chain = LocalChain(small(text, f"{{SGD: {{lr: {rate}}}}}"), delay=[1, 0])
    network = copy.deepcopy(nn.Sequential(*(step.layers for step in chain.steps)))
    head = list(network[0].parameters())
    rest = [p for module in network[1:] for p in module.parameters()]
    waits: list[Tensor] | None = None
    for x, y in batches(20):
        chain.train_batch(x, y)
        loss = nn.functional.cross_entropy(network(x), y)
        grads = torch.autograd.grad(loss, [*head, *rest])
        with torch.no_grad():
            for p, g in zip(rest, grads[len(head) :], strict=True):
                p.sub_(g, alpha=rate)
            for p, g in zip(head, waits or [], strict=False):
                p.sub_(g, alpha=rate)
        waits = list(grads[: len(head)])
    assert chain.steps[0].counters.lag_max == 1
    for (name, ours), theirs in zip(
        nn.Sequential(*(step.layers for step in chain.steps)).named_parameters(),
        network.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_correction_is_the_difference_from_what_was_used_at_once(small: Any) -> None:
    """Both are part of updates: over time a batch contributes its true gradient."""
    step = ModuleStep(small("{corrected: {weight: 0.25}}", "{SGD: {lr: 0.1}}")[1])
    ((x, y),) = batches(1)
    x = x[:, :8]
    before = copy.deepcopy(step.layers)
    step.forward(1, x)
    interface = step.interface
    assert interface is not None
    local = copy.deepcopy(interface).signal(before(x).detach(), y).g_BH
    step.update(y)

    def gradient(g: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(before(x), list(before.parameters()), g / len(x)))

    used = gradient(local)
    for now, then, g in zip(step.layers.parameters(), before.parameters(), used, strict=True):
        torch.testing.assert_close(now, then - 0.1 * g)
    true = torch.randn(16, 8)
    # The gradient goes back through the activations of then, by the weights of now.
    scale = (step.layers[1].weight / before[1].weight).detach().unsqueeze(1)
    (sent,) = step.late_gradient(1, true)
    assert sent is not None
    assert step.waiting == 0
    found = step.layers[0].weight.grad
    torch.testing.assert_close(found, gradient(true - local)[0] * scale, rtol=1e-3, atol=1e-6)
    step.forward(2, x)
    step.update(y)
    assert all(p.grad is None for p in step.layers.parameters())


def test_predicted_weights_go_on_as_the_newest_update(small: Any) -> None:
    """With a constant step the prediction is where the weights will be."""
    step = ModuleStep(small("{delayed: {predict: true}}", "{SGD: {lr: 0.1}}")[0])
    ((x, y),) = batches(1)
    g = torch.ones(16, 8)
    weight = step.layers[0].weight
    seen: list[Tensor] = []
    handle = step.layers[0].register_forward_pre_hook(lambda *_: seen.append(weight.clone()))
    for id in (1, 2):
        step.forward(id, x)
        step.update(y)
        step.late_gradient(id, g)
    update = step.optimization
    assert update.before is not None
    old, new = update.before[0].clone(), weight.detach().clone()
    for id in (3, 4, 5):
        step.forward(id, x)
        step.update(y)
    assert torch.equal(weight, new), "the prediction is for the forward pass alone"
    for updates, w in enumerate(seen[2:]):
        torch.testing.assert_close(w, new + updates * (new - old))
    handle.remove()


def test_one_update_late_a_prediction_feeds_the_error_of_the_last_back(small: Any) -> None:
    """Passes assume that the missing update equals the newest, so w moves by u + (u - the last u).

    The updates are those of SGD with momentum, by hand.
    """
    optimizer = "{SGD: {lr: 0.1, momentum: 0.9}}"
    step = ModuleStep(small("{delayed: {max_late: 1, predict: true}}", optimizer)[0])
    weight = step.layers[0].weight
    seen, gradients, draw = [], [], torch.Generator().manual_seed(3)
    step.layers[0].register_forward_pre_hook(lambda *_: seen.append(weight.detach().clone()))
    weight.register_hook(gradients.append)
    ((x, y),) = batches(1)
    for id in range(1, 9):
        step.forward(id, x)
        step.update(y)
        if id > 1:
            step.late_gradient(id - 1, torch.randn(16, 8, generator=draw))
    velocity, updates = torch.zeros_like(weight), []
    for g in gradients:
        velocity = 0.9 * velocity + g
        updates.append(-0.1 * velocity)
    assert torch.equal(seen[0], seen[1]), "there is no update yet"
    torch.testing.assert_close(seen[2], seen[1] + 2 * updates[0])
    for at in range(3, 8):
        u, before = updates[at - 2], updates[at - 3]
        torch.testing.assert_close(seen[at], seen[at - 1] + u + (u - before))


def test_predictions_count_updates_not_batches(small: Any) -> None:
    """With two batches in an update, every second batch on the way brings one."""
    first = small("{delayed: {predict: true}}", "{SGD: {lr: 0.1}}")[0]
    step = ModuleStep(first.model_copy(update={"accumulate": 2}))
    ((x, y),) = batches(1)
    weight = step.layers[0].weight
    seen: list[Tensor] = []
    step.layers[0].register_forward_pre_hook(lambda *_: seen.append(weight.clone()))
    for id in range(1, 6):  # two updates, and the first half of another
        step.forward(id, x)
        step.update(y)
        step.late_gradient(id, torch.ones(16, 8))
    before = step.optimization.before
    assert before is not None
    old, new = before[0].clone(), weight.detach().clone()
    for id in range(6, 10):
        step.forward(id, x)
        step.update(y)
    for updates, w in zip((0, 1, 1, 2), seen[5:], strict=True):
        torch.testing.assert_close(w, new + updates * (new - old))
