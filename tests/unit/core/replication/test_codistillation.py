"""Codistillation, beside a plain loop of models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import SpecError
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.replicas import workers_of
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.replicas import INFO, learn, replicas, share, shared
from tests.specs import specs_of

NORMED = """\
name: net
replication: {strategy: %s}
defaults: {interface: local, optimizer: {SGD: {lr: 0.1}}, ema: 0.9}
modules:
- {name: a, layers: [{Linear: {in_features: 8, out_features: 8}}]}
- name: b
  replicas: 2
  layers: [{Linear: {in_features: 8, out_features: 6}}, {BatchNorm1d: {num_features: 6}}, {Dropout: {p: 0.2}}]
- {name: c, layers: [{Linear: {in_features: 6, out_features: 4}}]}
"""  # noqa: E501


def normed(strategy: str) -> list[WorkerSpec]:
    workers = workers_of(specs_of(NORMED % strategy, INFO))
    return [one for one in workers if one.replicas > 1]


def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8, generator=draw), torch.randint(0, 4, (8,), generator=draw)


@pytest.mark.parametrize(
    ("count", "keep"), [(2, "weights"), (2, "input"), (3, "input"), (4, "weights")]
)
def test_it_is_a_plain_loop_of_models_with_stale_copies(count: int, keep: str) -> None:
    """Trained by true gradients; the second term begins after two points, and has another copy."""
    strategy = "{codistillation: {weight: 3.0, burn_in: 2}}"
    training = "optimizer: {SGD: {lr: 0.1}}"
    specs = replicas(strategy, count, training=training)
    interface = specs[0].interface
    assert interface is not None
    kept = interface.model_copy(update={"args": {"keep": keep}})
    steps = [ModuleStep(one.model_copy(update={"interface": kept})) for one in specs]
    models = [nn.Linear(8, 6) for _ in steps]
    for model in models:
        model.load_state_dict({k[2:]: v for k, v in steps[0].layers.state_dict().items()})
    stale: list[nn.Linear] = []
    draw = torch.Generator().manual_seed(1)
    for id in range(1, 13):
        for number, (step, model) in enumerate(zip(steps, models, strict=True)):
            x, target = torch.randn(4, 8, generator=draw), torch.randn(4, 6, generator=draw)
            learn(step, id, x, target)
            h = model(x)
            loss = (h - target).square().sum(1).mean() / 2
            if id > 6:
                loss = loss + 3.0 * nn.functional.mse_loss(h, stale[number](x).detach())
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has none
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
            for ours, theirs in zip(step.layers.parameters(), model.parameters(), strict=True):
                assert torch.allclose(ours, theirs, atol=1e-5), (id, number)
        if id % 3 == 0:
            share(steps, id)
            stale, by = [nn.Linear(8, 6) for _ in models], 1 + (id // 3 - 1) % (count - 1)
            for number, copy in enumerate(stale):
                copy.load_state_dict(models[(number + by) % count].state_dict())


def test_an_error_signal_of_the_modules_own_has_the_term_too() -> None:
    """One step with it and one without differ by its gradient."""
    steps = [ModuleStep(one) for one in normed("{codistillation: {weight: 2.0}}")]
    without = ModuleStep(normed("{codistillation: {burn_in: 9}}")[0])
    draw = torch.Generator().manual_seed(1)
    for step in steps:
        x, y = batch(draw)
        step.forward(1, x)
        step.update(y)
    restore(without, *copy_state(steps[0]))
    share(steps)
    share([without, steps[1]])
    other, model = (nn.Sequential(*list(one.layers)[:2]) for one in (steps[1], steps[0]))
    x, y = batch(draw)
    for step in (*steps, without):
        for one in step.layers.modules():
            if isinstance(one, nn.Dropout):
                one.p = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    with steps[0].without_trace(), steps[1].without_trace():
        term = 2.0 * nn.functional.mse_loss(model(x), other(x).detach())
        gradients = torch.autograd.grad(term, list(model.parameters()))
    for step in (steps[0], without):
        step.forward(2, x)
        step.update(y)
    drawn, free = steps[0].layers.parameters(), without.layers.parameters()
    for p, q, start, g in zip(drawn, free, before, gradients, strict=True):
        if q.dim() > 1:  # a bias before a normalisation has a gradient of rounding errors only
            assert not torch.equal(q, start)
        assert torch.allclose(p - q, -0.1 * g, atol=1e-6)


def test_the_last_module_has_the_term_too() -> None:
    """Beside plain torch: at the predictions, as in the paper."""
    text = NORMED.replace("  replicas: 2\n", "").replace("{name: c,", "{name: c, replicas: 2,")
    workers = workers_of(specs_of(text % "{codistillation: {weight: 2.0}}", INFO))
    steps = [ModuleStep(one) for one in workers if one.module[0] == "c"]
    draw = torch.Generator().manual_seed(1)
    models, kept = [nn.Linear(6, 4) for _ in steps], dict[nn.Module, dict[str, Tensor]]()
    for id in (1, 2):
        for step, model, other in zip(steps, models, reversed(models), strict=True):
            if id == 1:
                model.load_state_dict({k[2:]: v for k, v in step.layers.state_dict().items()})
            x, y = torch.randn(8, 6, generator=draw), torch.randint(0, 4, (8,), generator=draw)
            loss = nn.functional.cross_entropy(model(x), y)
            if id == 2:
                stale = nn.Linear(6, 4)
                stale.load_state_dict(kept[other])
                loss = loss + 2.0 * nn.functional.mse_loss(model(x), stale(x).detach())
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.1 * g
            step.forward(id, x)
            step.update(y)
            for ours, theirs in zip(step.layers.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)
        kept = {model: copy.deepcopy(model.state_dict()) for model in models}
        share(steps, id)


def test_weights_and_statistics_stay_each_ones_own() -> None:
    steps = [ModuleStep(one) for one in normed("codistillation")]
    draw = torch.Generator().manual_seed(1)
    for step in steps:
        x, y = batch(draw)
        step.forward(1, x)
        step.update(y)
    rows = [shared(step).row() for step in steps]
    assert not torch.equal(*rows)
    share(steps, full=True)
    for step, row, other in zip(steps, rows, reversed(rows), strict=True):
        assert torch.equal(shared(step).row(), row)
        learnt = dict(shared(step).strategy.named_buffers())["other_P"]
        assert torch.allclose(learnt, other[: len(learnt)], atol=1e-6)
    again = ModuleStep(normed("codistillation")[1])
    restore(again, *copy_state(steps[1]))
    x, y = batch(draw)
    for step in (steps[1], again):
        torch.manual_seed(5)
        step.forward(2, x)
        step.update(y)
    assert torch.equal(shared(again).row(), shared(steps[1]).row())


@pytest.mark.parametrize(
    ("strategy", "count", "message"),
    [
        ("codistillation, compression: int8", 2, "'compression' needs a row that all had last"),
        ("{codistillation: {weight: -1}}", 2, "weight"),
    ],
)
def test_what_it_cannot_have(strategy: str, count: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replicas(strategy, count)


def test_a_lost_offer_leaves_the_copies_right() -> None:
    """Those that share give each other their rows; the lost one keeps the copy that it had."""
    first, lost, third = (ModuleStep(one) for one in replicas("codistillation", 3))
    for id, step in enumerate((first, lost, third), start=1):
        learn(step, id, torch.randn(4, 8), torch.randn(4, 6))
    rows = {step: shared(step).row() for step in (first, third)}
    share([first, third])
    for step, other in ((first, third), (third, first)):
        copy = dict(shared(step).strategy.named_buffers())["other_P"]
        assert torch.equal(copy, rows[other][: len(copy)])
    share([first])
    assert torch.equal(shared(first).row(), rows[first])
