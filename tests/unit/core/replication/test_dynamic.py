"""Dynamic averaging sends rows only after a replica has drifted."""

from __future__ import annotations

import torch

from dni_runtime.core.step import ModuleStep
from tests.replicas import learn, replicas, share, shared


def test_rows_are_sent_at_the_point_after_a_drift() -> None:
    """The same as a plain loop that measures the distances."""
    threshold, due, means = 0.05, False, 0
    steps = [ModuleStep(spec) for spec in replicas(f"{{dynamic: {{threshold: {threshold}}}}}")]
    wanted = [shared(step).row() for step in steps]
    reference, draw = wanted[0], torch.Generator().manual_seed(1)
    for id in range(1, 21):
        for number, step in enumerate(steps):
            before = shared(step).row()
            x_BX, target_BH = torch.randn(4, 8, generator=draw), torch.randn(4, 6, generator=draw)
            learn(step, id, x_BX, target_BH)
            wanted[number] = wanted[number] + shared(step).row() - before
        full = id == 20
        sent = share(steps, id, full=full)
        if due or full:
            reference = (wanted[0] + wanted[1]) / 2
            wanted, due, means = [reference, reference], False, means + 1
            assert sent > 400
        else:
            due = any(float((one - reference).square().sum()) > threshold for one in wanted)
            assert sent == 2 * 16
        for step, row in zip(steps, wanted, strict=True):
            assert torch.allclose(shared(step).row(), row, atol=1e-5)
    assert 3 < means < 12
    assert torch.equal(shared(steps[0]).row(), shared(steps[1]).row())


def test_nothing_is_sent_while_all_are_near() -> None:
    steps = [ModuleStep(spec) for spec in replicas("{dynamic: {threshold: 1000}}")]
    for id in range(1, 6):
        for step in steps:
            learn(step, id, torch.randn(4, 8), torch.randn(4, 6))
        assert share(steps, id) == 2 * 16
    assert not torch.equal(shared(steps[0]).row(), shared(steps[1]).row())
