"""LARS, LAMB and Muon, beside the formulas of their papers; Muon also beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core.optimizers import LAMB, LARS, Muon
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import SpecError
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.specs import specs_of
from tests.unit.core.conftest import CHAIN, INFO

Rule = Callable[[Tensor, Tensor, dict[str, Any], bool], Tensor]


def lars(w: Tensor, g: Tensor, kept: dict[str, Any], adapt: bool) -> Tensor:
    """Algorithm 1 of You et al. 2017: lr 2, m 0.9, beta 0.1, eta 0.01."""
    local = 1.0
    if adapt and w.norm() > 0 and g.norm() > 0:
        local = 0.01 * float(w.norm()) / (float(g.norm()) + 0.1 * float(w.norm()))
    kept["v"] = 0.9 * kept.get("v", 0) + 2 * local * (g + 0.1 * w)
    return w - kept["v"]


def lamb(w: Tensor, g: Tensor, kept: dict[str, Any], adapt: bool) -> Tensor:
    """Algorithm 2 of You et al. 2019: lr 0.1, betas 0.8 and 0.95, lambda 0.1."""
    t = kept["t"] = kept.get("t", 0) + 1
    kept["m"] = 0.8 * kept.get("m", 0) + 0.2 * g
    kept["v"] = 0.95 * kept.get("v", 0) + 0.05 * g * g
    m, v = kept["m"] / (1 - 0.8**t), kept["v"] / (1 - 0.95**t)
    u = m / (v.sqrt() + 1e-6) + 0.1 * w
    ratio = float(w.norm() / u.norm()) if adapt and w.norm() > 0 else 1.0
    return w - 0.1 * ratio * u


def follow(
    optimizer: torch.optim.Optimizer, ours: list[nn.Parameter], rule: Rule, draw: torch.Generator,
    **tolerance: float,
) -> None:  # fmt: skip
    """Compare six steps with a rule; the third parameter has no gradient at times."""
    kept: list[dict[str, Any]] = [{} for _ in ours]
    wanted = [p.detach().clone() for p in ours]
    for number in range(6):
        for at, p in enumerate(ours):
            p.grad = None
            if at != 2 or number % 2:
                g = p.grad = torch.randn(p.shape, generator=draw)
                wanted[at] = rule(wanted[at], g, kept[at], at < 3)
        optimizer.step()
        for p, one in zip(ours, wanted, strict=True):
            torch.testing.assert_close(p.detach(), one, **tolerance)


@pytest.mark.parametrize(
    ("cls", "options", "rule"),
    [
        (LARS, {"lr": 2, "weight_decay": 0.1, "trust_coefficient": 0.01}, lars),
        (LAMB, {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}, lamb),
    ],
)
def test_they_are_their_papers_formulas(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], rule: Rule
) -> None:
    """Of a matrix, a new bias, a tensor without gradient at times, and one that is not adapted."""
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(3, 4, generator=draw), torch.zeros(3), torch.ones(2, 2, 2), torch.ones(5)]
    ours = [nn.Parameter(one) for one in start]
    groups = [{"params": ours[:3]}, {"params": ours[3:], "adapt": False}]
    optimizer = cls(groups, **options)  # type: ignore[call-arg]  # of the subclass
    follow(optimizer, ours, rule, draw)


def muon(w: Tensor, g: Tensor, kept: dict[str, Any], adapt: bool) -> Tensor:
    """lr 0.1, lambda 0.2, momentum 0.9; the iterations are a polynomial of the singular values."""
    kept["b"] = 0.9 * kept.get("b", 0) + 0.1 * g
    u, s, v = torch.linalg.svd((0.1 * g + 0.9 * kept["b"]).double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    scale = max(1, w.shape[0] / w.shape[1]) ** 0.5
    if adapt:
        scale = 0.2 * max(w.shape) ** 0.5
    return (1 - 0.1 * 0.2) * w - 0.1 * scale * (u * s @ v).float()


MATRICES = [(6, 4), (3, 5), (6, 4), (4, 4), (6, 4)]


def test_muon_is_its_formula() -> None:
    """Of matrices, some of one shape, one of which has no gradient at times; for both steps."""
    draw = torch.Generator().manual_seed(1)
    ours = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in MATRICES]
    groups = [{"params": ours[:3], "adjust_lr_fn": "match_rms_adamw"}, {"params": ours[3:]}]
    optimizer = Muon(groups, lr=0.1, weight_decay=0.2, momentum=0.9)
    follow(optimizer, ours, muon, draw, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_in_float32(
    adjust: str | None, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the other's state in the middle, as a checkpoint of another version would be."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    draw = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=draw) for shape in MATRICES]
    options: dict[str, Any] = {"lr": 0.05, "adjust_lr_fn": adjust, "nesterov": nesterov}
    ours, theirs = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    own, torchs = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for number in range(8):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=draw)
            q.grad = p.grad.clone()
        own.step()
        torchs.step()
        if number == 3:
            one, other = own.state_dict(), torchs.state_dict()
            own.load_state_dict(other)
            torchs.load_state_dict(one)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def step_of(optimizer: str, groups: str = "[]") -> ModuleStep:
    text = CHAIN % (f"local, groups: {groups}", optimizer)
    return ModuleStep(specs_of(text, INFO)[0])


ADAPTED = "[{parameters: [norms, biases], options: {weight_decay: 0.0, adapt: false}}]"


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("LARS", ADAPTED),
        ("LAMB", ADAPTED),
        ("Adam", "[{parameters: matrices, optimizer: {Muon: {lr: 0.01}}}]"),
    ],
)
def test_their_state_is_part_of_checkpoints(name: str, groups: str) -> None:
    step, again = step_of(name, groups), step_of(name, groups)
    draw = torch.Generator().manual_seed(1)

    def train(*steps: ModuleStep) -> None:
        x, y = torch.randn(16, 12, generator=draw), torch.randint(0, 3, (16,), generator=draw)
        for one in steps:
            one.forward(1, x)
            one.update(y)

    for _ in range(3):
        train(step)
    restore(again, *copy_state(step))
    train(step, again)
    for ours, theirs in zip(step.layers.parameters(), again.layers.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("{LARS: {momentum: 1.5}}", "momentum is 1.5, but must be at least 0 and less than 1"),
        ("{LAMB: {lr: -1}}", "lr is -1, but must be at least 0"),
        ("{LAMB: {betas: [0.9, 1.0]}}", "betas is"),
        ("{LAMB: {trust: 1}}", "LAMB has no keyword 'trust'"),
        ("{Muon: {momentum: 1.0}}", "momentum is 1.0, but must be at least 0 and less than 1"),
        ("{Muon: {adjust_lr_fn: adam}}", "must be 'original' or 'match_rms_adamw'"),
        ("Muon", r"Muon updates real matrices, but one parameter is 8"),
    ],
)
def test_wrong_values_are_refused(optimizer: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        step_of(optimizer)
