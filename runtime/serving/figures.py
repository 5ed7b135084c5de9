"""Figures of the versions of a model: what they have answered, how fast, and what waits."""

from __future__ import annotations

from pydantic import ConfigDict

from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.figures import Histogram, counter, gauge, histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class RequestFigures(Document):
    """Figures of the requests to one version; they change in place."""

    model_config = ConfigDict(frozen=False)

    requests: dict[str, int] = counter("requests, by status", by="status", default={})
    request_s: Histogram = histogram("time from a request to its answer", "s", bounds=_SECONDS)


class VersionFigures(Document):
    """Figures of what computes a version's answers; they change in place."""

    model_config = ConfigDict(frozen=False)

    ready: int = gauge("whether a batch has gone through all modules of late", default=0)
    waiting_rows: int = gauge("rows that wait to be put into a batch", "rows", default=0)
    batch_rows: Histogram = histogram("rows of each batch", "rows", bounds=_ROWS)
    batch_s: Histogram = histogram("time from a batch to its last answer", "s", bounds=_SECONDS)
    exits: dict[str, int] = counter("rows that left at an exit, by module", by="exit", default={})
    degraded: int = counter("answers of an exit because no module after it responded", default=0)
    probes: dict[str, int] = counter("probes, by result", by="result", default={})
