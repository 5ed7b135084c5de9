"""Strategies of replicas, and what they share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core.replication import DiLoCo, LocalSgd, Shared, Strategy, mean_of
from dni_runtime.core.resolve import worker_specs
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import CheckpointError
from dni_runtime.spec import DataInfo, TensorSpec, WorkerSpec, parse_chain
from dni_runtime.spec.named import Frozen
from dni_runtime.spec.replicas import workers_of
from dni_runtime.worker.checkpoint import restore, snapshot

INFO = DataInfo(
    sample=TensorSpec(shape=(8,), dtype="float32"),
    label=TensorSpec(shape=(), dtype="int64"),
    classes=4,
)
CHAIN = """\
name: net
replication: {strategy: %s}
defaults: {interface: mixed, optimizer: {SGD: {lr: 0.1}}, ema: 0.9}
modules:
- {name: a, layers: [{Linear: {in_features: 8, out_features: 8}}]}
- {name: b, replicas: 2, layers: [{Linear: {in_features: 8, out_features: 8}}, {BatchNorm1d: {num_features: 8}}]}
- {name: c, layers: [{Linear: {in_features: 8, out_features: 4}}]}
"""  # noqa: E501


class Half(Strategy):
    """A user's strategy."""

    def agree(self, mean_P: Tensor) -> Tensor:
        return mean_P / 2


def replicas(strategy: str = "local-sgd") -> list[WorkerSpec]:
    chain = parse_chain(CHAIN % strategy)
    return [one for one in workers_of(worker_specs(chain, INFO)) if one.replicas > 1]


def trained(spec: WorkerSpec, seed: int, batches: int = 3) -> ModuleStep:
    step, draw = ModuleStep(spec), torch.Generator().manual_seed(seed)
    for id in range(1, batches + 1):
        step.forward(id, torch.randn(4, 8, generator=draw))
        step.update(torch.randint(0, 4, (4,), generator=draw))
    return step


def shared(step: ModuleStep) -> Shared:
    assert step.shared is not None
    return step.shared


def state(step: ModuleStep) -> dict[str, Tensor]:
    tensors, _ = snapshot(step)
    kinds = ("layers.", "interface.", "average.")
    return {k: v for k, v in tensors.items() if k.startswith(kinds) and v.is_floating_point()}


def test_replicas_begin_equal_and_agree_on_the_mean() -> None:
    first, second = replicas()
    assert torch.equal(shared(ModuleStep(first)).row(), shared(ModuleStep(second)).row())
    one, other = trained(first, 1), trained(second, 2)
    before = [state(one), state(other)]
    version = one.optimization.version
    mean = mean_of([shared(one).row(), shared(other).row()])
    for step in (one, other):
        shared(step).agree(mean)
    assert one.optimization.version > version, "passes that are kept must not use the new weights"
    for name, value in state(one).items():
        assert torch.allclose(value, (before[0][name] + before[1][name]) / 2, atol=1e-6), name
        assert torch.equal(value, state(other)[name])
    assert len(state(one)) == len(before[0]) > 8, "statistics, heads and averages, too"


def test_the_mean_is_weighted_by_batches() -> None:
    """A replica that has got no batch since all agreed does not hold the others back."""
    first, second = replicas()
    one, other = trained(first, 1), ModuleStep(second)
    rows = [shared(one).row(), shared(other).row()]
    assert (rows[0][-1], rows[1][-1]) == (3, 0)
    assert torch.equal(mean_of(rows), rows[0])
    shared(one).agree(rows[0])
    assert shared(one).row()[-1] == 0
    rows = [shared(one).row(), shared(other).row()]
    assert torch.allclose(mean_of(rows), (rows[0] + rows[1]) / 2, atol=1e-6)
    rows[0][-1], rows[1][-1] = 3, 1
    assert torch.allclose(mean_of(rows)[:-1], (0.75 * rows[0] + 0.25 * rows[1])[:-1], atol=1e-6)


def test_diloco_is_sgd_with_nesterov_momentum_on_the_distance() -> None:
    start = torch.randn(6)
    ours = DiLoCo(DiLoCo.Options(lr=0.5, momentum=0.8), start)
    theirs = nn.Parameter(start.clone())
    outer = torch.optim.SGD([theirs], lr=0.5, momentum=0.8, nesterov=True)
    for seed in range(4):
        mean = theirs.detach() + torch.randn(6, generator=torch.Generator().manual_seed(seed))
        theirs.grad = theirs.detach() - mean
        outer.step()
        assert torch.allclose(ours.agree(mean), theirs.detach(), atol=1e-6)


def test_diloco_without_momentum_at_rate_1_is_local_sgd() -> None:
    start, mean = torch.randn(6), torch.randn(6)
    ours = DiLoCo(DiLoCo.Options(lr=1.0, momentum=0.0), start).agree(mean)
    assert torch.allclose(ours, LocalSgd(LocalSgd.Options(), start).agree(mean), atol=1e-6)


def test_a_strategy_of_the_users_own() -> None:
    step = ModuleStep(replicas(f"{{import: '{__name__}:Half'}}")[0])
    row = shared(step).row()
    learnt = sum(p.numel() for p in step.layers.parameters())
    shared(step).agree(row)
    assert torch.equal(shared(step).row()[:learnt], row[:learnt] / 2)


def test_the_strategy_is_part_of_a_checkpoint() -> None:
    spec = replicas("diloco")[0]
    step = trained(spec, 1)
    shared(step).agree(shared(step).row())
    tensors, document = snapshot(step)
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


def test_options_are_the_strategys() -> None:
    assert Strategy.Options is not DiLoCo.Options
    assert issubclass(DiLoCo.Options, Frozen)
