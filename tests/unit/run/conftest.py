"""A small chain, its workers, its plan and its run."""

from __future__ import annotations

from tests.unit.runs import chain, make_worker, plan, prepared, record, workers

__all__ = ["chain", "make_worker", "plan", "prepared", "record", "workers"]
