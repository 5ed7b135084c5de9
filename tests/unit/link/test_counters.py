"""Refusals are counted all, and logged rarely."""

from __future__ import annotations

import logging

import pytest

from dni_runtime.errors import WireError
from dni_runtime.link import counters
from dni_runtime.link.counters import LinkCounters, Refusals


def test_counts_all_and_logs_the_first(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(counters.time, "monotonic", lambda: now_s)
    counts = LinkCounters()
    refuse = Refusals(counts, "stem → tail", logging.getLogger("test"))
    for _ in range(5):
        refuse(WireError("shape", "wrong"))
    refuse(WireError("version", "new"))
    assert counts.refused == {"shape": 5, "version": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "link stem → tail: refused (shape): wrong; 1 refused so far"
    ]
    now_s += 11
    refuse(WireError("kind", "odd"))
    assert caplog.records[-1].getMessage().endswith("(kind): odd; 7 refused so far")
