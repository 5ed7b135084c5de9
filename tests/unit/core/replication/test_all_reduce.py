"""All-reduce is training with a large batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import SpecError
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import parse_chain
from dni_runtime.worker.checkpoint import copy_state
from tests.replicas import CHAIN, INFO, learn, replicas, share
from tests.specs import int64, refused, specs_of

SPARSE = """\
name: net
replication: {strategy: %s}
defaults: {interface: delayed, optimizer: {Adam: {}}}
modules:
- {name: a, inputs: data.0, layers: [{Linear: {in_features: 8, out_features: 8}}]}
- name: b
  inputs: data.1
  replicas: 2
  optimizer: SparseAdam
  layers: [{Embedding: {num_embeddings: 8, embedding_dim: 4, sparse: true}}, Flatten]
- {name: c, inputs: [a, b], layers: [Add, {Linear: {in_features: 8, out_features: 4}}]}
"""
TOKENS = INFO.model_copy(update={"further": (int64(2),)})
TRAINING = "optimizer: {Adam: {lr: 0.01}}, clip: {norm: 0.5}, ema: 0.9"


def state(step: ModuleStep) -> dict[str, Tensor]:
    tensors, _ = copy_state(step)
    return {k: v for k, v in tensors.items() if k.startswith(("layers.", "average.", "optimizer."))}


def test_it_is_one_process_with_a_large_batch() -> None:
    """Whichever replica gets how many batches; clipping, Adam and the average of weights, too."""
    steps = [ModuleStep(spec) for spec in replicas("all-reduce", 3, training=TRAINING)]
    (alone,) = (ModuleStep(spec) for spec in replicas("local-sgd", 1, training=TRAINING))
    draw, id = torch.Generator().manual_seed(1), 0
    for to in ([0, 1, 2, 1], [1, 1, 1, 2], [0, 2, 0, 1]):
        x_BX, target_BH = torch.randn(16, 8, generator=draw), torch.randn(16, 6, generator=draw)
        for one, x, target in zip(to, x_BX.split(4), target_BH.split(4), strict=True):
            id += 1
            learn(steps[one], id, x, target)
        share(steps)
        learn(alone, id, x_BX, target_BH)
        wanted = state(alone)
        for name, value in state(steps[0]).items():
            assert torch.allclose(value, wanted[name], atol=1e-6), name
        for step in steps:
            for name, value in state(step).items():
                if value.is_floating_point() and not name.startswith("optimizer."):
                    assert torch.allclose(value, wanted[name], atol=1e-6), name


def test_a_schedule_that_counts_batches_follows_the_step() -> None:
    training = "optimizer: {SGD: {lr: 0.1}}, schedule: {StepLR: {step_size: 1}}, "
    training += "schedule_every: batch"
    steps = [ModuleStep(spec) for spec in replicas("all-reduce", 2, training=training)]
    before, bias = (p.detach().clone() for p in steps[0].layers.parameters())
    x_BX, target_BH = torch.ones(4, 8), torch.zeros(4, 6)
    g_HX = torch.func.grad(lambda w: (x_BX @ w.T + bias).square().sum() / 8)
    for number, step in enumerate(steps):
        learn(step, number + 1, x_BX, target_BH)
    share(steps)
    wanted = before - 0.1 * g_HX(before)
    for step in steps:
        assert torch.allclose(step.layers[0].weight, wanted, atol=1e-6)
        rates = [one.param_groups[0]["lr"] for one in step.optimization.optimizers.values()]
        assert rates == pytest.approx([0.01])


def test_what_no_replica_has_a_gradient_of_is_left_alone() -> None:
    training = "optimizer: {SGD: {lr: 0.1, momentum: 0.9, weight_decay: 0.5}}"
    steps = [ModuleStep(spec) for spec in replicas("all-reduce", 2, training=training)]
    before = steps[0].layers[0].bias.detach().clone()
    for id, step in enumerate(steps, 1):
        learn(step, id, torch.ones(4, 8), torch.zeros(4, 6))
        step.layers[0].bias.grad = None
    share(steps, 2)
    assert torch.equal(steps[0].layers[0].bias, before)
    learn(steps[1], 3, torch.ones(4, 8), torch.zeros(4, 6))
    share(steps, 3)
    assert not torch.equal(steps[0].layers[0].bias, before)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3.0), ("sqrt", 3**0.5)])
def test_learning_rates_grow_with_the_batches_of_a_step(rule: str, factor: float) -> None:
    """Those of groups and schedules, too, but not where a module has one worker."""
    training = (
        "optimizer: {SGD: {lr: 0.1}}, schedule: {LinearLR: {start_factor: 0.5}}, "
        "groups: [{parameters: biases, options: {lr: 0.2}}]"
    )
    rates = [
        [group["lr"] for group in ModuleStep(spec).optimization.optimizers["module"].param_groups]
        for spec in (
            replicas(f"all-reduce, scale_lr: {rule}", 3, training=training)[2],
            replicas(f"all-reduce, every: 3, scale_lr: {rule}", 2, training=training)[0],
            replicas(f"all-reduce, scale_lr: {rule}", 1, training=training)[0],
        )
    ]
    assert rates[0] == rates[1] == pytest.approx([0.05 * factor, 0.1 * factor])
    assert rates[2] == pytest.approx([0.05, 0.1])


def test_learning_rates_do_not_grow_where_each_batch_is_a_step() -> None:
    with pytest.raises(SpecError, match="'local-sgd' each replica makes a step for each batch"):
        replicas("local-sgd, scale_lr: linear")


def test_there_is_no_step_without_a_batch() -> None:
    steps = [ModuleStep(spec) for spec in replicas("all-reduce")]
    before = [state(step) for step in steps]
    share(steps, full=True)
    for step, old in zip(steps, before, strict=True):
        for name, value in state(step).items():
            assert torch.equal(value, old[name]), name


def test_a_replica_that_has_missed_a_step_is_right_again() -> None:
    one, other = (ModuleStep(spec) for spec in replicas("all-reduce"))
    for id in range(1, 4):
        for step in (one, other):
            learn(step, id, torch.randn(4, 8), torch.randn(4, 6))
        share([one, other] if id != 2 else [one])
    assert all(torch.equal(v, state(other)[k]) for k, v in state(one).items() if "layers" in k)


def test_a_step_is_one_batch_of_each() -> None:
    chain = parse_chain(CHAIN % ("all-reduce", "delayed", "accumulate: 1", 3, ""))
    head, *_ = worker_specs(chain, INFO)
    assert head.head is not None
    assert head.head.sync_steps == 3
    with pytest.raises(SpecError, match="'accumulate' and 'all-reduce' exclude each other"):
        replicas("all-reduce", training="accumulate: 2")


def test_sparse_gradients_are_refused() -> None:
    for strategy in ("all-reduce", "admm"):
        refused(SPARSE % strategy, TOKENS, f"'{strategy}' changes gradients of all rows")
    assert specs_of(SPARSE % "local-sgd", TOKENS)
