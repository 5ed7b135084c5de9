"""Strategies of replicas, and what they share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from dni_runtime.core.replication import Strategy, Sync, mean_of
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import CheckpointError, SpecError
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.replicas import workers_of
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.replicas import CHAIN, INFO, learn, share, shared
from tests.replicas import replicas as linear
from tests.specs import specs_of


class Half(Strategy):
    """A user's strategy."""

    def agree(self, mean_P: Tensor) -> Tensor:
        return mean_P / 2


def replicas(strategy: str = "local-sgd") -> list[WorkerSpec]:
    training, norm = "optimizer: {SGD: {lr: 0.1}}, ema: 0.9", ", {BatchNorm1d: {num_features: 6}}"
    return linear(strategy, interface="mixed", training=training, more=norm)


def trained(spec: WorkerSpec, seed: int, batches: int = 3) -> ModuleStep:
    step, draw = ModuleStep(spec), torch.Generator().manual_seed(seed)
    for id in range(1, batches + 1):
        step.forward(id, torch.randn(4, 8, generator=draw))
        step.update(torch.randint(0, 4, (4,), generator=draw))
    return step


def state(step: ModuleStep) -> dict[str, Tensor]:
    tensors, _ = copy_state(step)
    kinds = ("layers.", "interface.", "average.")
    return {k: v for k, v in tensors.items() if k.startswith(kinds) and v.is_floating_point()}


def test_replicas_begin_equal_and_agree_on_the_mean() -> None:
    first, second = replicas()
    assert torch.equal(shared(ModuleStep(first)).row(), shared(ModuleStep(second)).row())
    one, other = trained(first, 1), trained(second, 2)
    before = [state(one), state(other)]
    version = one.optimization.version
    share([one, other])
    assert one.optimization.version > version, "passes that are kept must not use the new weights"
    for name, value in state(one).items():
        assert torch.allclose(value, (before[0][name] + before[1][name]) / 2, atol=1e-6), name
        assert torch.equal(value, state(other)[name])
    assert len(state(one)) == len(before[0]) > 8, "statistics, heads and averages, too"


def test_the_mean_is_weighted_by_samples() -> None:
    """A replica that has got no batch since all agreed does not hold the others back."""
    first, second = replicas()
    one, other = trained(first, 1), ModuleStep(second)
    learnt = shared(one).row()
    assert (shared(one).samples, shared(other).samples) == (12, 0)
    share([one, other])
    assert torch.equal(shared(other).row(), learnt)
    assert (shared(one).samples, shared(other).samples) == (0, 0)
    rows = [torch.randn(5), torch.randn(5)]
    assert torch.allclose(mean_of(rows, [0, 0]), (rows[0] + rows[1]) / 2, atol=1e-6)
    assert torch.allclose(mean_of(rows, [3, 1]), 0.75 * rows[0] + 0.25 * rows[1], atol=1e-6)
    mask = torch.tensor([0.0, -torch.inf])
    for weights in ([1, 0], [0, 0], [2, 1]):
        assert torch.equal(mean_of([mask, mask], weights), mask)


def test_what_all_agree_on_is_no_update_to_go_on_with() -> None:
    """`predict` assumes that the newest update of the optimizer comes again."""
    specs = linear("local-sgd", interface="{delayed: {predict: true}}")
    steps, draw = [ModuleStep(spec) for spec in specs], torch.Generator().manual_seed(1)
    for step in steps:
        learn(step, 1, torch.randn(4, 8, generator=draw), torch.randn(4, 6, generator=draw))
    share(steps)
    for step in steps:
        row = shared(step).row()
        with step.optimization.ahead(2):
            assert torch.equal(shared(step).row(), row)
        learn(step, 2, torch.randn(4, 8, generator=draw), torch.randn(4, 6, generator=draw))
        moved = shared(step).row() - row
        with step.optimization.ahead(2):
            torch.testing.assert_close(shared(step).row(), row + 3 * moved)


def test_a_strategy_of_the_users_own() -> None:
    step = ModuleStep(replicas(f"{{import: '{__name__}:Half'}}")[0])
    shared(step).samples = 1
    row = shared(step).row()
    learnt = sum(p.numel() for p in step.layers.parameters())
    shared(step).agree(Sync(1, full=False), {})
    assert torch.equal(shared(step).row()[:learnt], row[:learnt] / 2)


def test_the_strategy_is_part_of_a_checkpoint() -> None:
    spec = replicas("diloco")[0]
    step = trained(spec, 1)
    shared(step).agree(Sync(1, full=False), {})
    tensors, document = copy_state(step)
    assert "strategy.velocity_P" in tensors
    again = ModuleStep(spec)
    restore(again, tensors, document)
    for name, value in shared(step).strategy.state_dict().items():
        assert torch.equal(shared(again).strategy.state_dict()[name], value)
    for name in [name for name in tensors if name.startswith("strategy.")]:
        del tensors[name]
    restore(again, tensors, document)  # of the same module without replicas
    assert torch.equal(shared(again).row(), shared(step).row())
    assert not dict(shared(again).strategy.state_dict())["velocity_P"].any()
    with pytest.raises(CheckpointError):
        restore(again, {**tensors, "strategy.other": torch.zeros(1)}, document)


def test_what_is_not_a_sum_of_steps_is_not_compressed() -> None:
    """Error feedback would count statistics twice: variances became negative, and all was NaN."""
    first, second = replicas("local-sgd, compression: {top-k: {share: 0.05}}")
    one, other = trained(first, 1), trained(second, 2)
    before = [state(one), state(other)]
    share([one, other])
    exact = 0
    for name, value in state(one).items():
        assert torch.equal(value, state(other)[name]), name
        mean = (before[0][name] + before[1][name]) / 2
        if name.startswith("average.") or "running" in name:
            assert torch.allclose(value, mean, atol=1e-6), name
            exact += 1
        elif name == "layers.0.weight":
            assert not torch.allclose(value, mean, atol=1e-6), name
    assert exact >= 8


OWN = ", {import: 'tests.unit.core.idioms:%s', args: {features: 6%s}}"


@pytest.mark.parametrize("kind", ["Centred", "Scaled"])
def test_statistics_are_shared_by_name(kind: str) -> None:
    """Whatever ``forward`` does to the attribute; the mean is computed by hand."""
    steps = [ModuleStep(spec) for spec in linear("local-sgd", more=OWN % (kind, ""))]
    name = {"Centred": "1.mean", "Scaled": "1.scale"}[kind]
    seen = [torch.randn(4, 8), torch.randn(12, 8)]
    own = []
    for step, x in zip(steps, seen, strict=True):
        layers = copy.deepcopy(step.layers)
        layers(x)
        own.append(layers.state_dict()[name])
        learn(step, 1, x, torch.zeros(len(x), 6))
    share(steps)
    for step in steps:
        found = step.layers.state_dict()[name]
        torch.testing.assert_close(found, (4 * own[0] + 12 * own[1]) / 16)
    before = found.clone()
    layers = copy.deepcopy(steps[0].layers)
    steps[0].forward(2, seen[0])
    layers(seen[0])
    assert torch.equal(steps[0].layers.state_dict()[name], layers.state_dict()[name])
    assert not torch.equal(steps[0].layers.state_dict()[name], before), "it goes on from the mean"


@pytest.mark.parametrize("strategy", ["local-sgd", "all-reduce", "admm", "diloco"])
@pytest.mark.parametrize("compression", ["", "bfloat16"])
def test_complex_parameters_are_shared(strategy: str, compression: str) -> None:
    """Of one replica that alone has learnt, or of two that have learnt the same."""
    chain = f"{strategy}, compression: {compression}" if compression else strategy
    steps = [ModuleStep(spec) for spec in linear(chain, more=OWN % ("Complex", ""))]
    x, target = torch.randn(8, 8), torch.randn(8, 6)
    layers = copy.deepcopy(steps[0].layers)
    (0.5 * (layers(x) - target).square().sum() / len(x)).backward()
    factor = 1.0 + 0.9 if strategy == "diloco" else 1.0  # Nesterov's first step
    factor *= 0.7 if strategy == "diloco" else 1.0
    for step in steps:
        learn(step, 1, x, target)
    share(steps)
    for name, p in layers.named_parameters():
        expected = p.detach() - 0.1 * factor * p.grad
        for step in steps:
            found = dict(step.layers.named_parameters())[name].detach()
            close = {"rtol": 0.02, "atol": 2e-3} if compression else {}
            torch.testing.assert_close(found, expected, **close)
    assert steps[0].layers[1].weight.imag.abs().min() > 0.1


@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_what_a_row_would_round_is_refused(dtype: str) -> None:
    layer = OWN % ("Complex", f", dtype: {dtype}")
    if dtype == "float64":
        layer = OWN % ("Centred", f", dtype: {dtype}")
    with pytest.raises(SpecError, match=f"'1.*' of module 'b' is of {dtype}") as caught:
        linear("local-sgd", more=layer)
    assert caught.value.location == ("modules", 1, "replicas")


def test_a_buffer_that_grows_is_no_buffer_to_share() -> None:
    step = ModuleStep(linear("local-sgd", more=OWN % ("Centred", ""))[0])
    step.layers[1].mean = torch.zeros(7)
    with pytest.raises(SpecError, match=r"a buffer of module 'b\.1' has changed its size"):
        shared(step).row()


def test_replicas_of_a_module_without_numbers() -> None:
    chain = CHAIN % ("local-sgd", "delayed", "optimizer: {SGD: {lr: 0.1}}", 2, "")
    layer = "{Linear: {in_features: 8, out_features: 6}}"
    chain = chain.replace(layer, "Flatten").replace("in_features: 6", "in_features: 8")
    specs = [one for one in workers_of(specs_of(chain, INFO)) if "b" in one.module]
    steps = [ModuleStep(spec) for spec in specs]
    share(steps)
    assert shared(steps[0]).row().shape == (0,)
