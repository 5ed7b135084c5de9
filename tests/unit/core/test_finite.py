"""Numbers that are not finite: found, and learnt from by nobody."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core.finite import all_finite, finite, state_finite
from dni_runtime.core.step import ModuleStep
from dni_runtime.spec import DataInfo, parse_chain
from tests.specs import float32, int64, linear, specs_of

CHAIN = """\
name: small
data: {batch_size: 4}
on_nan: %s
defaults: {interface: %s, optimizer: {Adam: {lr: 0.1}}}
""" + linear(6, 6, 5, 3, between="ReLU")
INFO = DataInfo(sample=float32(6), label=int64(), classes=3)
X, Y = torch.arange(24.0).reshape(4, 6) / 24, torch.tensor([0, 1, 2, 0])
G = torch.ones(4, 5)


def module(interface: str, on_nan: str = "stop", index: int = 1) -> ModuleStep:
    return ModuleStep(specs_of(CHAIN % (on_nan, interface), INFO)[index])


def state(step: ModuleStep) -> list[Tensor]:
    parts: list[nn.Module] = [step.layers]
    if step.interface is not None:
        parts.append(step.interface)
    return [tensor.clone() for part in parts for tensor in part.state_dict().values()]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_mask_of_a_types_least_number_is_finite() -> None:
    """Its sum is not."""
    layer = nn.Linear(2, 2)
    layer.register_buffer("mask", torch.full((8, 8), torch.finfo(torch.float32).min).triu(1))
    assert state_finite(layer)
    with torch.no_grad():
        layer.weight[0, 0] = math.inf
    assert not state_finite(layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_is_found(dtype: torch.dtype, value: float) -> None:
    tensor = torch.full((50, 70), 1000.0, dtype=dtype)
    assert finite(tensor)
    tensor[49, 3] = value
    assert not finite(tensor)
    assert not all_finite([torch.ones(3), tensor, torch.ones(2, 2)])


def test_what_holds_no_floats_is_finite() -> None:
    assert all_finite([])
    assert finite(torch.tensor([1, 2]))
    assert finite(torch.zeros(0, 3))


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    (embedding(torch.tensor([1])).sum() * math.nan).backward()
    assert embedding.weight.grad is not None
    assert not all_finite([torch.ones(2), embedding.weight.grad])


def test_statistics_count_too() -> None:
    norm = nn.BatchNorm1d(3)
    assert state_finite(nn.Linear(2, 2), norm)
    assert norm.running_var is not None
    norm.running_var[0] = math.inf
    assert not state_finite(nn.Linear(2, 2), norm)


@pytest.mark.parametrize("interface", ["synthetic", "mixed"])
def test_a_gradient_that_is_not_finite_teaches_nothing(interface: str) -> None:
    step = module(interface)
    step.forward(1, X)
    step.update(Y)
    before = state(step)
    step.late_gradient(1, None)
    assert same(before, state(step))
    assert (step.counters.gradients, step.counters.skipped) == (1, 1)
    step.forward(2, X)
    step.update(Y)
    step.late_gradient(2, G)
    assert step.counters.skipped == 1
    assert not same(before, state(step))


@pytest.mark.parametrize("interface", ["synthetic", "mixed"])
def test_nor_does_a_lesson_whose_loss_is_not(interface: str) -> None:
    """Whatever made it so: here finite gradients that cannot be squared."""
    step = module(interface)
    step.forward(1, X)
    step.update(Y)
    assert step.interface is not None
    before = [p.clone() for p in step.interface.parameters()]
    step.late_gradient(1, G * 1e25)
    assert same(before, list(step.interface.parameters()))


def test_an_early_head_does_not_learn_from_a_loss_that_is_not() -> None:
    step = module("local", "skip")
    assert step.interface is not None
    before = [p.clone() for p in step.interface.parameters()]
    step.interface.signal(torch.full((4, 5), math.nan), Y)
    assert same(before, list(step.interface.parameters()))


def test_true_gradients_that_are_not_finite_are_passed_on_and_update_nothing() -> None:
    step = module("exact")
    step.forward(1, X)
    step.update(Y)
    assert step.blocked
    before = state(step)
    (g_BX,) = step.late_gradient(1, None)
    assert g_BX is not None
    assert g_BX.shape == X.shape
    assert g_BX.isnan().all()  # the module upstream waits for it, too
    assert same(before, state(step))
    assert (step.blocked, step.batches) == (False, 1)


@pytest.mark.parametrize("interface", ["exact", "delayed", "mixed", "synthetic"])
def test_a_batch_that_is_skipped_leaves_no_trace(interface: str) -> None:
    step = module(interface, "skip")
    before = state(step)
    step.forward(1, X)
    (g_BX,) = step.skip()
    assert g_BX is not None
    assert g_BX.isnan().all()
    assert same(before, state(step))
    assert (step.blocked, step.waiting, step.batches) == (False, 0, 1)
    assert step.counters.loss is None


@pytest.mark.parametrize(("on_nan", "updates"), [("skip", False), ("warn", True), ("stop", True)])
def test_updates_by_gradients_that_are_not_finite(on_nan: str, updates: bool) -> None:
    step = module("mixed", on_nan, index=2)
    before = state(step)
    x = X[:, :5].clone()
    x[0, 0] = math.nan
    step.forward(1, x)
    step.update(Y)
    assert same(before, state(step)) is not updates
    assert step.finite is not updates
    assert step.optimization.skipped == (not updates)
    if not updates:
        step.forward(2, X[:, :5])
        step.update(Y)
        assert not same(before, state(step))
        assert step.finite


def test_on_nan_is_no_reason_to_build_images_again() -> None:
    def hashes(on_nan: str) -> list[str]:
        return [one.hash for one in specs_of(CHAIN % (on_nan, "mixed"), INFO)]

    assert hashes("stop") == hashes("skip")


def test_on_nan_takes_only_its_words() -> None:
    with pytest.raises(Exception, match="'stop', 'skip' or 'warn'"):
        parse_chain(CHAIN % ("ignore", "mixed"))
