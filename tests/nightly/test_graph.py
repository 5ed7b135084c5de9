"""A graph of modules whose workers are killed again and again."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from dni_runtime import Run
from dni_runtime.run.documents.state import RunState
from tests.conftest import eventually
from tests.e2e.conftest import PAUSES, Site, site
from tests.e2e.test_graph import DIAMOND, backpropagation, write

__all__ = ["site"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_any_module_may_be_killed(site: Site) -> None:
    """Its neighbours on both ways go on; every batch of every epoch is counted by all."""
    path = write(site, DIAMOND % f", {PAUSES}", "mixed", epochs=16)
    site.run("up", path, "--backend", "process", "-d")
    run = Run.open(site.latest.root)
    # Both ends at once: each waits for the other, and those between them for room.
    for names in (["left"], ["top"], ["stem"], ["top", "stem"]):
        step = run.status().modules[0].step or 0
        eventually("training goes on", lambda s=step: (run.status().modules[0].step or 0) > s + 5)
        before = RunState.read(site.latest).modules
        for name in names:
            os.kill(int(before[name].pid or 0), signal.SIGKILL)
        for name in names:
            eventually(
                f"{name} is back",
                lambda n=name, r=before[name].restarts: (
                    RunState.read(site.latest).modules[n].restarts > r
                ),
            )
    site.run("wait")
    figures = run.status()
    assert figures.state == "finished"
    assert {one.step for one in figures.modules} == {16 * 22}
    with backpropagation(run) as (reference, source):
        right = [(reference.predict(x).argmax(1) == y).float() for x, y in source.eval_batches()]
    assert figures.accuracy is not None
    assert figures.accuracy > float(torch.cat(right).mean()) - 0.06
