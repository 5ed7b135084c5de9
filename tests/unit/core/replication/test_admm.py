"""Consensus ADMM, beside a plain loop and the solution."""

from __future__ import annotations

import torch

from dni_runtime.core.step import ModuleStep
from tests.replicas import learn, replicas, share, shared


def test_it_is_a_plain_loop_and_solves_the_common_problem() -> None:
    """Least squares, whose data differ between the replicas."""
    rho, lr, local = 0.5, 0.1, 5
    training = f"optimizer: {{SGD: {{lr: {lr}}}}}"
    strategy = f"{{admm: {{rho: {rho}}}}}"
    steps = [ModuleStep(spec) for spec in replicas(strategy, training=training)]
    draw = torch.Generator().manual_seed(1)
    x = [torch.randn(32, 8, generator=draw) for _ in steps]
    target = [torch.randn(32, 6, generator=draw) for _ in steps]
    augmented = [torch.cat([one, torch.ones(32, 1)], 1) for one in x]
    start = steps[0].layers.state_dict()
    (weight, bias) = (value.clone() for value in start.values())
    z = torch.cat([weight, bias[:, None]], 1)
    w, u = [z.clone() for _ in steps], [torch.zeros_like(z) for _ in steps]
    for id in range(1, 151):
        for step, one, wanted in zip(steps, x, target, strict=True):
            learn(step, id, one, wanted)
        for number, (a, wanted) in enumerate(zip(augmented, target, strict=True)):
            gradient = (w[number] @ a.T - wanted.T) @ a / 32
            w[number] = w[number] - lr * (gradient + rho * (w[number] - z + u[number]))
        if id % local == 0:
            share(steps, id)
            z = (w[0] + u[0] + w[1] + u[1]) / 2
            u = [one + own - z for one, own in zip(u, w, strict=True)]
            w = [z.clone(), z.clone()]
            found = shared(steps[1]).row()
            ours = torch.cat([found[:48].view(6, 8), found[48:54].view(6, 1)], 1)
            assert torch.allclose(ours, z, atol=1e-5), id
    solution = torch.linalg.lstsq(torch.cat(augmented), torch.cat(target)).solution.T
    assert torch.allclose(z, solution, atol=0.02)
