"""Groups, clipping, accumulation, averages, sequences of schedules, frozen modules."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.step import ModuleStep
from tests.specs import refused, specs_of
from tests.unit.core.conftest import CHAIN, INFO
from tests.unit.core.test_numerics import batches, parameters


def tail(settings: str, optimizer: str = "{SGD: {lr: 0.1}}") -> ModuleStep:
    return ModuleStep(specs_of(CHAIN % (f"exact, {settings}", optimizer), INFO)[2])


def trained(step: ModuleStep, count: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    for id in range(1, count + 1):
        step.forward(id, torch.randn(16, 8))
        step.update(torch.randint(0, 3, (16,)))
    return [p.detach().clone() for p in step.layers.parameters()]


def gradient() -> list[Tensor]:
    """Of the tail's first batch."""
    before, after = tail("freeze: true"), tail("accumulate: 1")
    return [a - b for a, b in zip(trained(before), trained(after), strict=True)]


def test_clipping_by_norm_and_by_value() -> None:
    g = gradient()
    norm = float(torch.cat([one.flatten() for one in g]).norm())
    start = trained(tail("freeze: true"))
    clipped = trained(tail(f"clip: {{norm: {5 * norm}}}"))
    for p, before, one in zip(clipped, start, g, strict=True):
        torch.testing.assert_close(before - p, one / 2, rtol=1e-4, atol=1e-6)
    value = 5 * float(g[0].abs().max())
    clipped = trained(tail(f"clip: {{value: {value}}}"))
    for p, before, one in zip(clipped, start, g, strict=True):
        torch.testing.assert_close(before - p, one.clamp(-value / 10, value / 10))


def test_groups_have_options_and_optimizers_of_their_own() -> None:
    text = CHAIN % (
        "exact, groups: [{parameters: norms, options: {weight_decay: 0.0}}, "
        "{parameters: ['0.*'], optimizer: {SGD: {lr: 0.5}}}]",
        "{AdamW: {lr: 0.01, weight_decay: 0.3}}",
    )
    step = ModuleStep(specs_of(text, INFO)[0])
    module, group = step.optimization.optimizers.values()
    assert list(step.optimization.optimizers) == ["module", "group-1"]
    assert [g["weight_decay"] for g in module.param_groups] == [0.0]
    assert [p.shape for p in module.param_groups[0]["params"]] == [(8,), (8,)]
    assert isinstance(group, torch.optim.SGD)
    assert [p.shape for g in group.param_groups for p in g["params"]] == [(8, 12)]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("norms", {"1.weight", "1.bias"}),
        ("biases", {"0.bias", "1.bias", "3.bias", "5.bias_ih_l0", "5.bias_hh_l0"}),
        ("matrices", {"0.weight", "5.weight_ih_l0", "5.weight_hh_l0"}),
        ("embeddings", {"4.weight"}),
        ("3.*", {"3.weight", "3.bias"}),
    ],
)
def test_what_a_group_matches(what: str, expected: set[str]) -> None:
    from dni_runtime.core.optimization import _kinds, _matches
    from dni_runtime.spec import GroupSpec

    layers = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Conv1d(1, 1, 3),
        nn.Embedding(3, 4),
        nn.LSTM(4, 4),
    )
    group = GroupSpec(parameters=(what,), options={"lr": 1})
    kinds = _kinds(layers)
    assert {
        n for n, _ in layers.named_parameters() if _matches(group.parameters, n, kinds)
    } == expected


@pytest.mark.parametrize(
    ("groups", "at", "message"),
    [
        ("[{parameters: convs, options: {lr: 1}}]", "groups[0].parameters", "no parameter matches"),
        ("[{parameters: norms, options: {rl: 1}}]", "groups[0].options", "'rl'"),
        ("[{parameters: norms}]", "groups[0]", "either 'options' or an 'optimizer'"),
        ("[{parameters: norms, optimizer: Adm}]", "groups[0].optimizer", "'Adm'"),
    ],
)
def test_groups_that_are_wrong(groups: str, at: str, message: str) -> None:
    text = CHAIN % (f"exact, groups: {groups}", "{Adam: {lr: 0.01}}")
    error = refused(text, INFO, message)
    assert at in str(error)


def test_schedules_in_sequence() -> None:
    """Warm-up, then a cosine: as torch's own SequentialLR."""
    schedule = (
        "{SequentialLR: {milestones: [3], schedules: [{LinearLR: {start_factor: 0.25, "
        "total_iters: 3}}, {CosineAnnealingLR: {T_max: 5}}]}}"
    )
    step = tail(f"schedule_every: batch, schedule: {schedule}", "{Adam: {lr: 0.1}}")
    p = nn.Parameter(torch.zeros(1))
    reference = torch.optim.Adam([p], lr=0.1)
    own = torch.optim.lr_scheduler.SequentialLR(
        reference,
        [
            torch.optim.lr_scheduler.LinearLR(reference, 0.25, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(reference, 5),
        ],
        [3],
    )
    rates, expected = [], []
    for id in range(1, 9):
        step.forward(id, torch.randn(16, 8))
        step.update(torch.randint(0, 3, (16,)))
        reference.step()
        own.step()
        rates.append(step.optimization.optimizers["module"].param_groups[0]["lr"])
        expected.append(reference.param_groups[0]["lr"])
    assert rates == expected


@pytest.mark.parametrize(
    ("schedule", "fixed"),
    [
        ("{CosineAnnealingLR: {T_max: %s}}", 7),
        ("{SequentialLR: {milestones: [3], schedules: [{LinearLR: {total_iters: 3}}, "
         "{CosineAnnealingLR: {T_max: %s}}]}}", 4),
    ],
)  # fmt: skip
def test_auto_is_the_whole_training(schedule: str, fixed: int) -> None:
    """In a schedule after a milestone, what is left."""
    rates: list[list[float]] = []
    for number in ("auto", fixed):
        text = CHAIN % (
            f"exact, schedule_every: batch, schedule: {schedule % number}",
            "{SGD: {lr: 0.1}}",
        )
        worker = specs_of(f"steps: 7\n{text}", INFO)[-1]
        optimization = ModuleStep(worker).optimization
        rates.append([])
        for _ in range(7):
            rates[-1].append(optimization.optimizers["module"].param_groups[0]["lr"])
            optimization.count(1)
    assert rates[0] == rates[1]


def test_the_length_of_a_training_must_be_known() -> None:
    text = CHAIN % (
        "exact, schedule_every: batch, schedule: {OneCycleLR: {max_lr: 1, total_steps: auto}}",
        "SGD",
    )
    error = refused(text, INFO, "total_steps: auto needs the length of the training")
    assert "schedule.OneCycleLR.total_steps" in str(error)


def test_a_schedule_that_has_ended_keeps_its_last_rate() -> None:
    one_cycle = "{OneCycleLR: {max_lr: 0.1, total_steps: 4}}"
    step = tail(f"schedule_every: batch, schedule: {one_cycle}", "{Adam: {lr: 0.1}}")
    rates = []
    for id in range(1, 7):
        step.forward(id, torch.randn(16, 8))
        step.update(torch.randint(0, 3, (16,)))
        rates.append(step.optimization.optimizers["module"].param_groups[0]["lr"])
    assert rates[2:] == [min(rates)] * 4


ONE_CYCLE = "{OneCycleLR: {max_lr: 0.2, total_steps: 4, pct_start: 0.5, cycle_momentum: false}}"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (  # torch's OneCycleLR sets the rate that others begin with, 0.2 / 25, when it is made
            "SequentialLR: {milestones: [2], schedules: [{ConstantLR: {factor: 0.5}}, %s]}",
            [0.004, 0.008, 0.2, 0.1, 8e-7, 8e-7, 8e-7],
        ),
        (
            "ChainedScheduler: {schedules: [{ConstantLR: {factor: 0.5, total_iters: 2}}, "
            "{ExponentialLR: {gamma: 0.1}}]}",
            [5e-3, 1e-3, 1e-4, 1e-5],
        ),
        (  # what has ended leaves the rate to the other one
            "ChainedScheduler: {schedules: [%s, {ExponentialLR: {gamma: 0.5}}]}",
            [0.1, 0.05, 4e-7, 2e-7, 1e-7],
        ),
    ],
)
def test_schedules_of_schedules_go_on_after_an_end(schedule: str, expected: list[float]) -> None:
    schedule = schedule.replace("%s", ONE_CYCLE)
    step = tail(f"schedule_every: batch, schedule: {{{schedule}}}", "{SGD: {lr: 0.1}}")
    rates = []
    for id in range(1, len(expected) + 1):
        step.forward(id, torch.randn(16, 8))
        step.update(torch.randint(0, 3, (16,)))
        rates.append(step.optimization.optimizers["module"].param_groups[0]["lr"])
    assert rates == pytest.approx(expected, rel=1e-4)


def test_a_batch_that_is_replayed_is_none_for_the_schedule(small: Any) -> None:
    text = CHAIN % (
        "local, schedule_every: batch, schedule: {OneCycleLR: {max_lr: 0.1, total_steps: 3}}",
        "{Adam: {lr: 0.01}}",
    )
    step = ModuleStep(specs_of(text, INFO)[0])
    ((x, y),) = batches(1)
    for _ in range(5):
        step.replay(x, y)
    step.forward(1, x)
    step.update(y)
    assert (step.batches, step.optimization.schedules[0].last_epoch) == (1, 1)


def test_an_average_begins_with_the_initial_weights(tmp_path: Path) -> None:
    step = tail("ema: 0.5")
    wanted = {name: torch.randn_like(one) for name, one in step.layers.state_dict().items()}
    save_file(wanted, tmp_path / "initial.safetensors")
    step.load_initial(tmp_path / "initial.safetensors")
    found = step.evaluated.state_dict()
    assert all(torch.equal(found[f"module.{name}"], one) for name, one in wanted.items())


class Normed(nn.Sequential):
    """A layer with one of torch's norms of weights, old or new."""

    def __init__(self, norm: str) -> None:
        where = nn.utils if norm in ("weight_norm", "spectral_norm") else nn.utils.parametrizations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(getattr(where, norm.removeprefix("new_"))(nn.Linear(8, 8)))


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "new_weight_norm"])
def test_the_average_of_weights_that_a_norm_computes_from(norm: str) -> None:
    text = CHAIN % ("exact, ema: 0.5", "{SGD: {lr: 0.5}}")
    own = f"layers: [{{import: '{__name__}:Normed', args: {{norm: {norm}}}}}, "
    text = own.join(text.rsplit("layers: [", 1))
    step = ModuleStep(specs_of(text, INFO)[2])
    torch.manual_seed(1)
    plain = nn.Sequential(Normed(norm), nn.Linear(8, 3))
    plain.load_state_dict(step.layers.state_dict())
    average = nn.Sequential(Normed(norm), nn.Linear(8, 3))
    for id in range(1, 5):
        x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
        step.forward(id, x)
        step.update(y)
        nn.functional.cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for p in plain.parameters():
                assert p.grad is not None
                p -= 0.5 * p.grad
                p.grad = None
            if id == 1:
                average.load_state_dict(plain.state_dict())
            for mean, p in zip(average.parameters(), plain.parameters(), strict=True):
                mean.copy_((mean + p) / 2)
            for mean, p in zip(average.buffers(), plain.buffers(), strict=True):
                mean.copy_(p)
    torch.testing.assert_close(step.evaluate(x), average.eval()(x).detach())
    assert float((average(x) - plain.eval()(x)).detach().abs().max()) > 1e-2


class Keeping(nn.Linear):
    """A layer that keeps a result outside of what a copy includes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept = [self.weight * 2]


def test_an_average_of_what_cannot_be_copied_is_refused() -> None:
    text = CHAIN % ("exact, ema: 0.5", "{SGD: {lr: 0.5}}")
    text = f"layers: [{{import: '{__name__}:Keeping'}}, ".join(text.rsplit("layers: [", 1))
    error = refused(text, INFO, "needs a copy of the layers")
    assert error.location[-1] == "ema"


@pytest.mark.parametrize("interface", ["mixed", "delayed", "exact", "synthetic"])
def test_a_frozen_module_lets_gradients_pass(small: Any, interface: str) -> None:
    first, second, last = small(interface)
    frozen = second.model_copy(update={"freeze": ("*",)})
    chain, start = LocalChain([first, frozen, last]), LocalChain([first, frozen, last])
    for x, y in batches(3):
        chain.train_batch(x, y)
    moved = [
        any(map(torch.ne, *(one.layers[0].weight.flatten() for one in steps)))
        for steps in zip(chain.steps, start.steps, strict=True)
    ]
    assert moved == [True, False, True]
    if interface == "exact":
        reference = Backprop([first, frozen, last])
        for x, y in batches(3):
            reference.train_batch(x, y)
        for ours, theirs in zip(
            parameters(chain), reference.model.state_dict().values(), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_exact_is_backprop_with_dropout_too() -> None:
    text = (CHAIN % ("exact", "{Adam: {lr: 0.01}}")).replace("ReLU]", "ReLU, {Dropout: {p: 0.3}}]")
    workers = specs_of(text, INFO)
    chain, reference = LocalChain(workers), Backprop(workers)
    for x, y in batches(10):
        chain.train_batch(x, y)
        reference.train_batch(x, y)
    for ours, theirs in zip(parameters(chain), reference.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_hook_may_change_gradients_before_the_step() -> None:
    """It sees the mean of the accumulated batches, before clipping."""
    step, seen = tail("accumulate: 2, clip: {value: 0.001}"), list[float]()

    def clear(parameters: Sequence[Tensor]) -> None:
        seen.append(max(float(p.grad.abs().max()) for p in parameters if p.grad is not None))
        for p in parameters:
            if p.grad is not None:
                p.grad.zero_()

    step.optimization.before_step = clear
    before = [p.detach().clone() for p in step.layers.parameters()]
    after = trained(step, 4)
    assert len(seen) == 2
    assert min(seen) > 0.001
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
