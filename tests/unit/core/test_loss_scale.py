"""Loss scaling in float16, beside ``torch.amp.GradScaler``: on a GPU, and on the CPU."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core import optimization
from dni_runtime.core.optimization import Optimization
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import SpecError
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.conftest import DEVICES
from tests.replicas import replicas
from tests.specs import refused, specs_of
from tests.unit.core.conftest import CHAIN, INFO

FLOAT16 = "precision: float16"
START = 2.0**24
"""A factor at which the first gradients overflow."""


def specs(interface: str, settings: str = FLOAT16) -> tuple[WorkerSpec, ...]:
    text = CHAIN % (f"{interface}, {settings}", "{SGD: {lr: 0.1, momentum: 0.9}}")
    return specs_of(text + "on_nan: skip\n", INFO)


def scale_of(step: ModuleStep) -> optimization.LossScale:
    assert step.optimization.scale is not None
    return step.optimization.scale


def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 8, generator=draw), torch.randint(0, 3, (16,), generator=draw)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_torchs_grad_scaler(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail, whose factor falls until nothing overflows, and grows after four good updates."""
    monkeypatch.setattr(optimization, "_GROWTH_STEPS", 4)
    step = ModuleStep(specs("exact")[2], device)
    scale_of(step).value = START
    model = copy.deepcopy(step.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=START, growth_interval=4)
    draw, values = torch.Generator().manual_seed(1), []
    for id in range(1, 31):
        x, y = (one.to(device) for one in batch(draw))
        step.forward(id, x)
        step.update(y)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            p = model(x).float()
        scaler.scale(nn.functional.cross_entropy(p, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append(scale_of(step).value)
        assert values[-1] == scaler.get_scale()
        for ours, theirs in zip(step.layers.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5), id
    assert values[-1] < START
    assert any(b > a for a, b in pairwise(values))
    assert step.optimization.skipped > 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "interface", ["exact", "{delayed: {keep: input}}", "{delayed: {keep: weights}}"]
)
def test_small_gradients_arrive_at_weights_and_at_the_module_upstream(
    interface: str, device: str
) -> None:
    """As in float32; the type's smallest number is 6e-8, so that none would be left."""
    draw = torch.Generator().manual_seed(1)
    x, y = (one.to(device) for one in batch(draw))
    g = torch.randn(16, 8, generator=draw).to(device) * 1e-7
    found: list[list[Tensor]] = []
    for settings in (f"accumulate: 2, {FLOAT16}", "accumulate: 2"):
        step = ModuleStep(specs(interface, settings)[1], device)
        step.forward(1, x)
        step.update(y)
        (upstream,) = step.late_gradient(1, g)
        assert upstream is not None
        gradients = [p.grad for p in step.layers.parameters() if p.grad is not None]
        assert len(gradients) == 3
        found.append([upstream, *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=0.02 * float(theirs.abs().max()))


def test_an_update_that_overflows_is_left_out() -> None:
    step = ModuleStep(specs("exact")[1])
    before = [p.detach().clone() for p in step.layers.parameters()]
    x, y = batch(torch.Generator().manual_seed(1))
    step.forward(1, x)
    step.update(y)
    (upstream,) = step.late_gradient(1, torch.full((16, 8), 1e6))
    assert upstream is not None
    assert not upstream.isfinite().all(), "the module upstream learns nothing from it, either"
    assert all(torch.equal(*one) for one in zip(step.layers.parameters(), before, strict=True))
    assert (step.optimization.skipped, scale_of(step).value) == (1, 32768.0)
    again = ModuleStep(specs("exact")[1])
    restore(again, *copy_state(step))
    assert (scale_of(again).value, scale_of(again).steps) == (32768.0, 0)


def test_other_precisions_have_no_scale() -> None:
    for precision in ("float32", "bfloat16"):
        spec = specs("exact", f"precision: {precision}")[2]
        assert Optimization(spec, nn.Linear(2, 2)).scale is None


@pytest.mark.parametrize(
    ("chain", "at", "message"),
    [
        (CHAIN % (f"exact, {FLOAT16}", "Adam"), "on_nan", "stop the run"),
        (
            "name: net\non_nan: skip\ndefaults: {interface: local, precision: float16}\nmodules:\n"
            "- {name: a, layers: [{Unflatten: {dim: 1, unflattened_size: [3, 4]}}, "
            "{Recurrent: {cell: GRU, input_size: 4, hidden_size: 8}}, Flatten]}\n"
            "- {name: b, layers: [{Linear: {in_features: 24, out_features: 3}}]}\n",
            "precision",
            "recurrent layer",
        ),
    ],
)
def test_what_does_not_work_with_it(chain: str, at: str, message: str) -> None:
    error = refused(chain, INFO, message)
    assert at in error.path


def test_replicas_that_make_one_step_have_no_common_scale() -> None:
    training = f"optimizer: {{SGD: {{lr: 0.1}}}}, {FLOAT16}"
    with pytest.raises(SpecError, match="with 'all-reduce' only the first would see it"):
        replicas("all-reduce}\non_nan: skip\nrestart: {limit: 10", training=training)
    assert replicas("local-sgd}\non_nan: skip\nrestart: {limit: 10", training=training)


def test_the_factor_of_a_frozen_module_falls_too() -> None:
    """Else what is upstream of it would skip every update."""
    text = CHAIN % (f"exact, {FLOAT16}", "{SGD: {lr: 0.1}}") + "on_nan: skip\n"
    frozen = ModuleStep(specs_of(text.replace("name: b", "name: b\n    freeze: true"), INFO)[1])
    assert not frozen.optimization.parameters
    x, y = batch(torch.Generator().manual_seed(1))
    for id in range(1, 60):
        frozen.forward(id, x)
        frozen.update(y)
        (upstream,) = frozen.late_gradient(id, torch.full((16, 8), 1e4))
        assert upstream is not None
        if upstream.isfinite().all():
            break
    assert upstream.isfinite().all()
    assert 1 < scale_of(frozen).value < 65536
