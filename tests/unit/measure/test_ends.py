"""What the ends of a measured link make of their clocks."""

from __future__ import annotations

from typing import cast

import pytest

from dni_runtime.measure.ends import Job, Sink, receive
from dni_runtime.spec import LinksSpec


def test_each_batch_that_is_waited_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one, which says that no more follow."""
    job, now = Job(1_000_000, LinksSpec(), latency=False), 0

    class Steady:
        """Gets a batch of a megabyte each second."""

        def take(self) -> bool:
            nonlocal now
            now += 1
            return now < job.discard + 21

    monkeypatch.setattr("time.perf_counter", lambda: float(now))
    assert receive(cast("Sink", Steady()), job) == 1.0
